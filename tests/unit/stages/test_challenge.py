"""The challenge: when there is nothing to compare, who is served in which order, and which prompts are asked."""

import json

import pytest

from eagle3_core.artifacts import Kind
from eagle3_core.config import RunConfig
from eagle3_core.config.champion import Champion, Pinned
from eagle3_core.context import StageContext
from eagle3_core.data.prompts import conversation
from eagle3_core.errors import InputError
from eagle3_core.evaluate.bench.stream import StreamedAnswer
from eagle3_core.pipeline import STAGES
from eagle3_core.progress import Progress
from eagle3_core.stages import challenge
from eagle3_core.storage import load
from eagle3_core.storage.local import LocalStore

TARGET = "7" * 64
RUN = RunConfig.parse({"name": "tiny", "target": {"model": "x"}, "data": {"prompts": "x"}}, "test")
PASSES = {"champion": 30, "challenger": 20}


def prompt(name, held_out=True, system=None):
    messages = [{"role": "user", "content": f"say {name}"}]
    return {"id": name, "messages": [*([{"role": "system", "content": system}] if system else []), *messages],
            "later_turns": [], "domain": "d", "held_out": held_out, "input_ids": [1]}  # fmt: skip


def digest(name):
    return conversation([{"role": "user", "content": f"say {name}"}], ())


@pytest.fixture
def stage(tmp_path, monkeypatch, put_in):
    """Run the stage with a server that accepts as often as its side is told; what was served is kept."""
    store, served = LocalStore(tmp_path / "root"), []
    put = put_in(store)

    def serve(_context, side, drafter, prompts, passes):
        served.append((side, drafter.key, [one.id for one in prompts], passes))
        return [
            StreamedAnswer(id=one.id, domain="d", repeat=repeat, prompt_tokens=1, output_ids=(1,), completion_tokens=60,
                           finish_reason="length", verify_passes=PASSES[side], accept_histogram=(PASSES[side],),
                           latency_s=1.0, ttft_s=0.1, concurrency=1, max_new_tokens=60, temperature=0.0,
                           empty=False, loop=False)
            for repeat in range(passes) for one in prompts
        ]  # fmt: skip

    monkeypatch.setattr(challenge, "_serve", serve)
    monkeypatch.setattr(challenge, "require_target", lambda *_: tmp_path)

    def champion(learnt=(), target=TARGET, drafter="b"):
        report = put("report/b", Kind.EVAL_REPORT, {"trained_on.txt": "".join(f"{digest(one)}\n" for one in learnt)})
        ref = put(f"export/{drafter}", Kind.DRAFTER, {"w": drafter})
        pin = lambda one: Pinned(key=one.key, manifest_sha256=one.manifest_sha256)  # noqa: E731
        return Champion(drafter=pin(ref), checkpoint=pin(ref), report=pin(report), target_sha256=target)

    def run(champion=None, prompts=None, drafter="a", **evaluation):
        lines = prompts or [prompt(f"h{at}") for at in range(6)] + [prompt("t", held_out=False)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        inputs = {
            "prompt_set": put("prepare/p", Kind.PROMPT_SET, {"prompts.jsonl": text}, target={"sha256": TARGET}),
            "drafter": put(f"export/{drafter}", Kind.DRAFTER, {"w": drafter}),
            "parity": put("parity/p", Kind.PARITY, {"w": "p"}),
        }
        config = RUN.model_copy(
            update={"champion": champion, "evaluation": RUN.evaluation.model_copy(update=evaluation)}
        )
        work = tmp_path / "work"
        work.mkdir(exist_ok=True)
        ref = challenge.run(
            StageContext(STAGES["challenge"], config, store, inputs, None, work, Progress("challenge", None))
        )
        return ref, load(store, ref).json("challenge.json")

    run.champion, run.served, run.store = champion, served, store
    return run


def test_without_a_champion_nothing_is_served_and_that_is_said(stage):
    ref, found = stage()
    assert (found["state"], found["against"], stage.served) == ("no champion", None, [])
    assert ref.facts["said"] == "no champion: nothing was published as tiny yet"


def test_a_champion_of_another_target_is_none_for_this_one(stage):
    _, found = stage(stage.champion(target="8" * 64))
    assert (found["state"], stage.served) == ("other target", [])
    assert (
        found["said"]
        == "no champion for this target: export/b drafts for target 888888888888, this one is 777777777777"
    )


def test_the_champion_does_not_challenge_itself(stage):
    _, found = stage(stage.champion(), drafter="b")
    assert (found["state"], stage.served) == ("same drafter", [])


def test_the_champion_is_served_first_and_last_and_the_challenger_twice_as_long_between(stage):
    ref, found = stage(stage.champion(), repeats=2)
    assert [(side, key, passes) for side, key, _, passes in stage.served] == [
        ("champion", "export/b", 2), ("challenger", "export/a", 4), ("champion", "export/b", 2),
    ]  # fmt: skip
    assert len({tuple(asked) for _, _, asked, _ in stage.served}) == 1
    assert found["order"] == ["champion, 2 pass(es)", "challenger, 4 pass(es)", "champion, 2 pass(es)"]
    assert (found["against"]["passes"], found["against"]["prompts"]) == (4, 6)
    assert found["against"]["acceptance"]["ratio"] == 1.5
    assert ref.facts == {"state": "compared", "said": "better than export/b"}
    answers = load(stage.store, ref).json("answers.json")
    assert sorted(answer["repeat"] for answer in answers["champion"] if answer["id"] == "h0") == [0, 1, 2, 3]


def test_prompts_that_the_champion_was_trained_on_are_not_asked_and_are_counted(stage):
    lines = [prompt("h0", system="Be brief."), *(prompt(f"h{at}") for at in range(1, 6)), prompt("t", held_out=False)]
    _, found = stage(stage.champion(learnt=("h0", "h3", "elsewhere")), prompts=lines)
    assert found["left_out"] == 2
    assert sorted(stage.served[0][2]) == ["h1", "h2", "h4", "h5"]


def test_left_out_prompts_make_room_for_others(stage):
    _, found = stage(stage.champion(learnt=("h0", "h3")), max_prompts=4)
    assert (found["against"]["prompts"], found["left_out"]) == (4, 2)


def test_a_champion_that_knows_every_held_out_prompt_cannot_be_compared_fairly(stage):
    with pytest.raises(InputError, match="that export/b was not trained on, found 1 of 6"):
        stage(stage.champion(learnt=[f"h{at}" for at in range(5)]))
    assert stage.served == []


def test_another_champion_is_another_challenge_and_the_same_one_is_not_served_again(stage):
    first, _ = stage(stage.champion())
    again, _ = stage(stage.champion())
    other, _ = stage(stage.champion(drafter="c"))
    assert first == again != other
    assert len(stage.served) == 6
