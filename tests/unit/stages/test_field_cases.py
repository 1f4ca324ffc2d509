"""What others lost days to, as kinds: D3, D8, D11, D13, E1, E4, E7, E8, F5."""

import json

import pytest
import torch

from eagle3_core.artifacts import Kind
from eagle3_core.config import RunConfig
from eagle3_core.data.chat import Chat
from eagle3_core.data.corpus import read_corpus
from eagle3_core.data.features import FeatureSet
from eagle3_core.data.plan import read_plan
from eagle3_core.errors import CaptureMismatchError, EngineDiedError, StorageFullError
from eagle3_core.stages import preflight
from eagle3_core.storage import find, load
from eagle3_core.storage.local import LocalStore


def changed(config, section, **values):
    dumped = config.model_dump(mode="json")
    dumped[section] |= values
    return RunConfig.parse(dumped, "test")


class TwoTerabytes(LocalStore):
    """Says that 2 TB are free."""

    def free_bytes(self):
        return 2 * 10**12


def test_d13_five_terabytes_of_states_are_refused_before_any_engine_starts(flow, engine, prompts_file, tiny_target):
    """The article's corpus: 37,312 samples of 2,353 tokens on average, hidden size 7,168, three layers, bfloat16."""
    config = json.loads((tiny_target / "config.json").read_text()) | {"hidden_size": 7168}
    (tiny_target / "config.json").write_text(json.dumps(config))
    prompts_file.write_text("".join(json.dumps({"prompt": f"Question {number}?"}) + "\n" for number in range(37_312)))
    run = changed(flow.config, "capture", dtype="bfloat16")
    run = changed(run, "data", max_new_tokens=2 * (2353 - 64), max_sample_tokens=8192)
    with pytest.raises(StorageFullError, match=r"about 5,034,963,254,464 bytes .* found 2,000,000,000,000 free"):
        preflight._space(run, TwoTerabytes(flow.tmp_path / "root"))
    assert engine.starts == 0


def test_d3_a_header_of_ordinary_tokens_is_no_part_of_what_is_learnt(flow, tiny_target):
    header = "\nThe model says: "
    (tiny_target / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ '\\nThe model says: ' if m.role == 'assistant' else '' }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\\nThe model says: ' }}{% endif %}"
    )
    for name in ("prepare", "regenerate", "build_vocab", "plan_capture"):
        flow.run(name)
    flow.capture_all()
    answers = {answer.id: answer for answer in read_corpus(load(flow.store, flow.refs[Kind.CORPUS]))}
    chat, features = Chat(tiny_target), FeatureSet.open(flow.store, flow.run("seal"))
    for position, name in enumerate(features.sample_ids):
        sample = features.read(position)
        first = int(sample.loss_mask.nonzero()[0])
        assert chat.decode(sample.input_ids[:first].tolist()).endswith(header)
        assert sample.input_ids[first:].tolist() == answers[name].output_ids
        assert bool(sample.loss_mask[first:].all())


def test_d8_d11_another_draft_vocabulary_or_none_is_another_map_and_captures_nothing(sealed, engine):
    plan, captured, maps = sealed.refs[Kind.SHARD_PLAN], len(engine.captured), {}
    for size in (64, 100, None, 64):
        sealed.config = changed(sealed.config, "drafter", draft_vocab_size=size, min_coverage=0.01)
        maps.setdefault(size, {}).update({(ref := sealed.run("build_vocab")).key: ref.facts["draft_vocab_size"]})
        assert sealed.run("plan_capture") == plan
        sealed.capture_all()
    assert {size: list(found.values()) for size, found in maps.items()} == {64: [64], 100: [100], None: [130]}
    assert len(engine.captured) == captured


@pytest.mark.parametrize(
    "fault",
    [
        lambda aux, last: (aux[:-7], last[:-7]),  # E1: rows that a cache or a chunk swallowed
        lambda aux, last: (aux[:, :8], last),  # E4: a stock server, which hands out the last layer alone
        lambda aux, last: (torch.cat([aux, aux[-1:]]), torch.cat([last, last[-1:]])),
    ],
)
@pytest.mark.parametrize("at", [0, 3])
def test_e1_e4_states_that_are_not_those_asked_for_are_never_written_as_done(planned, engine, fault, at):
    engine.disturb = lambda number, aux, last: fault(aux, last) if number == at else (aux, last)
    with pytest.raises(CaptureMismatchError, match="expected shape"):
        planned.run("capture", 0)
    assert planned.store.list_keys("capture") == []
    assert len(engine.captured) <= len(
        read_plan(load(planned.store, planned.refs[Kind.SHARD_PLAN])).shards[0].sample_ids
    )
    engine.disturb = lambda number, aux, last: (aux, last)
    planned.capture_all()
    assert planned.run("seal").facts["samples"] == 40


def test_e7_a_capture_that_ended_after_any_sample_and_went_on_has_the_index_of_one_that_never_ended(flow_on, engine):
    def sealed_in(root, interruptions):
        flow = flow_on(str(flow_on("unused").tmp_path / root))
        for name in ("prepare", "regenerate", "build_vocab", "plan_capture"):
            flow.run(name)
        for after in interruptions:
            engine.fail_after = after
            index = next(i for i in range(5) if find(flow.store, flow.shard_key(i)) is None)
            try:
                flow.run("capture", index)
            except EngineDiedError:
                continue
        engine.fail_after = None
        flow.capture_all()
        return flow.run("seal").manifest_sha256

    whole = sealed_in("whole", [])
    assert {sealed_in(f"ended-after-{after}", [after, 9, after]) for after in range(0, 30, 3)} == {whole}


@pytest.mark.parametrize(
    ("section", "values", "same_states"),
    [
        ("data", {"max_sample_tokens": 256}, True),
        ("training", {"seed": 7}, True),
        ("drafter", {"draft_vocab_size": 64}, True),
        ("capture", {"shard_tokens": 300}, True),
        ("target", {"dtype": "bfloat16"}, False),
        ("capture", {"dtype": "bfloat16"}, False),
        ("capture", {"last_rows": "all"}, False),
        ("capture", {"fp8": "aux"}, False),
        ("capture", {"prefill_tokens": 64}, False),
        ("target", {"aux_layers": [1, 2, 4]}, False),
        ("data", {"system_prompt": "Be brief."}, False),
        ("data", {"temperature": 0.5}, None),
    ],
)
def test_e8_a_run_that_goes_on_with_other_settings_mixes_in_no_state_of_before(
    planned, engine, section, values, same_states, monkeypatch
):
    """Half of the shards are there; whatever is changed, a feature set holds what its own plan asks for, no more."""
    monkeypatch.setattr("eagle3_core.engine.spool.CALLERS", 1)
    engine.fail_after = 30
    planned.run("capture", 0)
    engine.fail_after = None
    before = {key for key in planned.store.list_keys("capture") if key.endswith("manifest.json")}
    assert len(before) == 2
    planned.config = changed(planned.config, section, **values)
    for name in ("prepare", "regenerate", "build_vocab", "plan_capture"):
        planned.run(name)
    plan = read_plan(load(planned.store, planned.refs[Kind.SHARD_PLAN]))
    keys = {f"{shard.key}/manifest.json" for shard in plan.shards}
    if same_states is not None:
        assert bool(keys & before) == same_states
    planned.capture_all()
    features = FeatureSet.open(planned.store, planned.run("seal"))
    assert features.encoding == plan.encoding
    assert features.aux_layers == plan.aux_layers
    for position in range(len(features)):
        sample = features.read(position).restored()
        wanted = engine.states(sample.input_ids, 24).to(getattr(torch, plan.dtype)).float()
        torch.testing.assert_close(
            sample.aux_hidden_states.float(), wanted, rtol=2**-4 if plan.fp8 == "aux" else 0, atol=2e-5
        )


def test_e8_the_order_of_the_prompts_decides_nothing(sealed, prompts_file):
    plan = sealed.refs[Kind.SHARD_PLAN]
    prompts_file.write_text("".join(reversed(prompts_file.read_text().splitlines(keepends=True))))
    for name in ("prepare", "regenerate", "build_vocab", "plan_capture"):
        sealed.run(name)
    assert sealed.refs[Kind.SHARD_PLAN] == plan


def test_f5_nothing_that_a_run_needs_lies_in_a_directory_for_temporary_files(planned, engine, monkeypatch):
    planned.run("capture", 0)
    elsewhere = planned.tmp_path / "after-a-reboot"
    elsewhere.mkdir()
    monkeypatch.setenv("TMPDIR", str(elsewhere))
    monkeypatch.setattr("tempfile.tempdir", None)
    planned.capture_all()
    planned.run("seal")
    assert list(elsewhere.iterdir()) == []
