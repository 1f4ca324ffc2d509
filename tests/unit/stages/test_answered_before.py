"""A corpus grows: prompts that were answered under the same settings are not asked again, whatever else changed."""

import dataclasses
import json

import pytest

from eagle3_core.artifacts import Kind
from eagle3_core.config import RunConfig
from eagle3_core.data.corpus import CORPUS, Answer, read_corpus, read_prompt_set
from eagle3_core.errors import EngineError, UnknownSchemaError
from eagle3_core.stages.regenerate import _Known
from eagle3_core.storage import commit, load, open_store


def changed(flow, section, **values):
    dumped = flow.config.model_dump(mode="json")
    dumped[section] |= values
    flow.config = RunConfig.parse(dumped, "test")


def add(path, lines):
    path.write_text(path.read_text() + "".join(json.dumps(line) + "\n" for line in lines))


def corpus(flow):
    for name in ("prepare", "regenerate"):
        flow.run(name)
    return {answer.id: answer for answer in read_corpus(load(flow.store, flow.refs[Kind.CORPUS]))}


def test_added_prompts_alone_are_answered_captured_and_sealed_with_the_others(flow, engine, prompts_file):
    before = corpus(flow)
    flow.run("plan_capture")
    flow.capture_all()
    flow.run("seal")
    add(prompts_file, [{"prompt": f"A later question {number}?"} for number in range(20)])
    engine.answered.clear()
    engine.captured.clear()
    after = corpus(flow)
    assert len(engine.answered) == 20
    assert before.items() <= after.items()
    plan = flow.run("plan_capture")
    assert plan.facts["captured_shards"] == 5
    flow.capture_all()
    old = {tuple(answer.input_ids + answer.output_ids) for answer in before.values()}
    assert not old & set(engine.captured)
    assert flow.run("seal").facts["samples"] == 60


def test_where_all_were_answered_before_no_engine_starts(flow, engine, prompts_file):
    first = corpus(flow)
    lines = prompts_file.read_text().splitlines(keepends=True)
    prompts_file.write_text("".join(lines[:30]))
    starts = engine.starts
    assert corpus(flow).items() <= first.items()
    prompts_file.write_text("".join(reversed(lines)))
    assert corpus(flow) == first
    assert engine.starts == starts


@pytest.mark.parametrize(
    ("section", "values"),
    [("data", {"max_new_tokens": 17}), ("serving", {"engine_args": {"x": 1}}), ("target", {"dtype": "bfloat16"})],
)
def test_another_setting_that_decides_answers_asks_all_anew(flow, engine, section, values):
    corpus(flow)
    changed(flow, section, **values)
    corpus(flow)
    assert len(engine.answered) == 80


def test_a_change_that_decides_no_answer_asks_nothing(flow, engine):
    before = corpus(flow)
    changed(flow, "data", held_out_fraction=0.4)
    after = corpus(flow)
    assert len(engine.answered) == 40
    assert [name for name in before if after[name].held_out != before[name].held_out]
    assert all(after[name].output_ids == before[name].output_ids for name in before)


def test_a_prompt_that_moves_to_the_held_out_is_answered_greedily(flow, engine):
    changed(flow, "data", temperature=0.7)
    before = corpus(flow)
    changed(flow, "data", temperature=0.7, held_out_fraction=0.4)
    after = corpus(flow)
    moved = [name for name in before if after[name].held_out and not before[name].held_out]
    assert moved
    assert len(engine.answered) == 40 + len(moved)


def test_later_turns_are_answered_again_only_after_another_answer(flow, engine, prompts_file):
    add(prompts_file, [{"turns": [f"First {number}", f"Then {number}"]} for number in range(5)])
    before = corpus(flow)
    asked = len(engine.answered)
    assert asked == 50
    add(prompts_file, [{"prompt": "One more?"}])
    after = corpus(flow)
    assert len(engine.answered) == asked + 1
    assert before.items() <= after.items()


def test_answers_of_another_version_are_refused_in_one_line(tmp_path):
    store, staged = open_store(str(tmp_path / "root")), tmp_path / "staged"
    staged.mkdir()
    (staged / CORPUS).write_text(json.dumps({"id": "a", "text": "b"}) + "\n")
    of_another = commit(store, "regenerate/answers/a/b", staged, Kind.CORPUS)
    with pytest.raises(UnknownSchemaError, match=r"written by another version .*'text'"):
        list(read_corpus(load(store, of_another)))


def test_a_server_that_leaves_a_prompt_unanswered_is_an_error(flow, engine, monkeypatch):
    from tests.unit import conftest

    real = conftest.Client.generate
    monkeypatch.setattr(
        type(engine.client()), "generate", lambda self, *a, **k: list(real(self, *a, **k))[:-1], raising=True
    )
    flow.run("prepare")
    with pytest.raises(EngineError, match="expected 40 answers, found 39; try again"):
        flow.run("regenerate")


def test_a_later_turn_is_asked_again_where_the_answer_before_it_is_another_one_now(
    flow, engine, prompts_file, monkeypatch
):
    prompts_file.write_text("")
    add(prompts_file, [{"turns": [f"First {number}", f"Then {number}"]} for number in range(16)])
    before = corpus(flow)
    first = flow.refs[Kind.CORPUS]
    root = flow.tmp_path / "root"
    (root / first.key / "manifest.json").unlink()
    chunks = {path: path.read_text() for path in (root / "regenerate" / "answers").glob("*/*/corpus.jsonl")}
    for path, text in chunks.items():
        if '.2"' not in text:
            path.write_text("torn")
    kind = type(engine.client())
    real = kind.generate

    def otherwise(self, prompts, sampling, **more):
        for generation in real(self, prompts, sampling, **more):
            generation.output_ids = [65, *generation.output_ids]
            yield generation

    monkeypatch.setattr(kind, "generate", otherwise)
    after = corpus(flow)
    assert after.keys() == before.keys()
    for name, answer in after.items():
        base, _, turn = name.partition(".")
        assert answer.output_ids[0] == 65
        if turn:
            spoken = after[base].input_ids + after[base].output_ids
            assert answer.input_ids[: len(spoken)] == spoken


def test_of_two_runs_that_answer_the_same_at_once_the_first_one_counts_for_both(flow, tmp_path):
    flow.run("prepare")
    prompts = read_prompt_set(load(flow.store, flow.refs[Kind.PROMPT_SET]))[:3]

    def answered(token):
        return [Answer(one.id, one.domain, one.held_out, one.input_ids, [token], "stop") for one in prompts]

    wanted = frozenset(one.id for one in prompts)
    first, second = (_Known(flow.store, {"target": "x"}, wanted) for _ in range(2))
    assert second.answer(prompts[0], 1.0) is None
    first.commit(answered(7), 1.0, tmp_path / "one")
    second.commit(answered(8), 1.0, tmp_path / "two")
    assert [known.answer(one, 1.0).output_ids for known in (first, second) for one in prompts] == [[7]] * 6


def test_second_turns_after_different_first_answers_are_both_remembered(flow, tmp_path):
    flow.run("prepare")
    first = read_prompt_set(load(flow.store, flow.refs[Kind.PROMPT_SET]))[0]
    turns = [dataclasses.replace(first, id=f"{first.id}.2", input_ids=[*first.input_ids, token]) for token in (7, 8)]
    known = _Known(flow.store, {"target": "x"}, frozenset([first.id]))
    for turn in turns:
        answer = Answer(turn.id, turn.domain, turn.held_out, turn.input_ids, [turn.input_ids[-1]], "stop")
        known.commit([answer], 1.0, tmp_path / "work")
    again = _Known(flow.store, {"target": "x"}, frozenset([first.id]))
    assert [again.answer(turn, 1.0).output_ids for turn in turns] == [[7], [8]]
