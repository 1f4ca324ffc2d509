"""A feature set grows: what is captured already is used again, what is new or different is captured, nothing else."""

import contextlib
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle3_core.artifacts import Kind
from eagle3_core.config import RunConfig
from eagle3_core.data.corpus import Answer
from eagle3_core.data.features import FeatureSet
from eagle3_core.data.plan import read_plan, shard_digest
from eagle3_core.data.reuse import arrange, captured_shards
from eagle3_core.data.shards import ShardIndex
from eagle3_core.errors import StoreUnreachableError, UnknownSchemaError
from eagle3_core.repair import inspect
from eagle3_core.storage import commit, load


def add_prompts(path, count):
    lines = [json.dumps({"prompt": f"A later question {number}?"}) + "\n" for number in range(count)]
    path.write_text(path.read_text() + "".join(lines))


def plan_again(flow):
    for name in ("prepare", "regenerate", "build_vocab"):
        flow.run(name)
    return flow.run("plan_capture")


def manifests(flow):
    return {path: path.stat().st_mtime_ns for path in (flow.tmp_path / "root" / "capture").glob("*/*/manifest.json")}


def test_added_prompts_alone_are_captured_and_both_feature_sets_are_whole(sealed, engine, prompts_file):
    before, written = sealed.refs[Kind.FEATURE_SET], manifests(sealed)
    add_prompts(prompts_file, 20)
    engine.captured.clear()
    plan = plan_again(sealed)
    assert (plan.facts["samples"], plan.facts["captured_shards"]) == (60, 5)
    sealed.capture_all()
    new = plan.facts["num_shards"] - 5
    assert len(engine.captured) == 20 + 3 * new
    assert sum(map(len, set(engine.captured))) == plan.facts["tokens_to_capture"]
    assert written.items() <= manifests(sealed).items()
    grown = sealed.run("seal")
    assert grown.facts["samples"] == 60
    assert [finding.state for finding in inspect(sealed.store, plan)] == ["ok"] * plan.facts["num_shards"]
    for ref, count in ((before, 40), (grown, 60)):
        features = FeatureSet.open(sealed.store, ref)
        assert len(features) == count
        for position in range(count):
            sample = features.read(position)
            assert torch.equal(sample.aux_hidden_states, engine.states(sample.input_ids, 24))


def test_another_precision_shares_no_shard(sealed):
    values = sealed.config.model_dump(mode="json")
    values["capture"]["dtype"] = "bfloat16"
    sealed.config = RunConfig.parse(values, "test")
    assert sealed.run("plan_capture").facts["captured_shards"] == 0


def test_another_engine_shares_no_shard(sealed, monkeypatch):
    monkeypatch.setattr("eagle3_core.engine.fingerprint.require_known_good", lambda _device: {"sglang": "newer"})
    assert sealed.run("plan_capture").facts["captured_shards"] == 0


@pytest.mark.parametrize(
    ("launch", "same"),
    [({"engine_args": {"quantization": "fp8"}}, False), ({"tensor_parallel": 2}, False),
     ({"engine_args": {"mem_fraction_static": 0.5}}, True)],
)  # fmt: skip
def test_a_launch_that_may_change_states_shares_no_shard_and_one_with_other_memory_every(sealed, launch, same):
    before, serving = sealed.refs[Kind.SHARD_PLAN], sealed.config.serving.model_copy(update=launch)
    sealed.config = sealed.config.model_copy(update={"serving": serving})
    plan = sealed.run("plan_capture")
    assert (plan == before) == same
    assert plan.facts["captured_shards"] == 0


def test_another_cut_shares_every_shard(sealed):
    values = sealed.config.model_dump(mode="json")
    values["capture"]["shard_tokens"] = 400
    sealed.config = RunConfig.parse(values, "test")
    plan = sealed.run("plan_capture")
    assert (plan.facts["captured_shards"], plan.facts["tokens_to_capture"]) == (5, 0)


def test_shards_of_samples_that_are_gone_and_damaged_shards_are_not_used_again(sealed, prompts_file):
    prompts_file.write_text("".join(prompts_file.read_text().splitlines(keepends=True)[1:]))
    plan = plan_again(sealed)
    assert (plan.facts["samples"], plan.facts["captured_shards"]) == (39, 4)
    planned = read_plan(load(sealed.store, plan))
    used = next(shard for shard in planned.shards if sealed.store.exists(f"{shard.key}/manifest.json"))
    (sealed.tmp_path / "root" / used.key / "index.json").write_text("torn")
    (sealed.tmp_path / "root" / plan.key / "manifest.json").unlink()
    assert sealed.run("plan_capture").facts["captured_shards"] == 3


def answer(name, salt=0):
    return Answer(name, "x", False, [1, 2, 3], [4 + salt, 5], "stop")


def shard_of(answers, identity="i"):
    ids, lengths = tuple(item.id for item in answers), tuple(item.length for item in answers)
    return ShardIndex(
        sample_ids=ids, lengths=lengths, label_rows=lengths, digest=shard_digest(identity, answers), not_finite=(),
        checksums={},
    )  # fmt: skip


def test_an_answer_that_differs_by_one_token_brings_its_shard_to_be_captured_again():
    corpus = [answer("a"), answer("b"), answer("c")]
    captured = [shard_of([answer("a"), answer("b", salt=1)]), shard_of([answer("c")])]
    found = arrange(corpus, "i", captured, 100, 10)
    assert (found.shards, found.fresh) == (((0, 1), (2,)), (0,))
    assert arrange(corpus, "another", captured, 100, 10).fresh == (0,)


def test_shards_that_overlap_are_not_both_used():
    corpus = [answer(name) for name in "abcd"]
    small, large = shard_of(corpus[:2]), shard_of(corpus[1:])
    found = arrange(corpus, "i", [small, large], 100, 10)
    assert (found.shards, found.fresh) == (((0,), (1, 2, 3)), (0,))
    large, small, rest = shard_of(corpus[:3]), shard_of(corpus[2:]), shard_of(corpus[3:])
    found = arrange(corpus, "i", [small, rest, large], 100, 10)
    assert (found.shards, found.fresh) == (((0, 1, 2), (3,)), ())


@pytest.mark.parametrize("fault", ["another kind", "not there", "unreachable"])
def test_a_shard_that_cannot_be_used_is_left_out_but_a_store_that_does_not_answer_is_said(sealed, monkeypatch, fault):
    key, real = sealed.shard_key(2), sealed.store.read_bytes
    if fault == "another kind":
        staged = sealed.tmp_path / "staged"
        staged.mkdir()
        (staged / "name").write_text("x")
        commit(sealed.store, key, staged, Kind.CORPUS, replace=True)
    else:
        error = StoreUnreachableError("try again") if fault == "unreachable" else FileNotFoundError()

        def read(asked):
            if asked == f"{key}/manifest.json":
                raise error
            return real(asked)

        monkeypatch.setattr(sealed.store, "read_bytes", read)
    with pytest.raises(StoreUnreachableError) if fault == "unreachable" else contextlib.nullcontext():
        assert len(captured_shards(sealed.store, key.split("/")[1])) == 4


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 12), st.integers(5, 60))
def test_every_sample_is_in_one_shard_whatever_is_captured_and_there_are_not_too_many(count, old, tasks, bound):
    corpus = [answer(f"{number:03d}") for number in range(count)]
    captured = [shard_of(corpus[at : at + 3]) for at in range(0, min(old, count), 3)]
    found = arrange(corpus, "i", captured, bound, tasks)
    assert sorted(position for shard in found.shards for position in shard) == list(range(count))
    assert len(found.shards) <= tasks


def test_with_all_tasks_taken_one_new_sample_costs_one_captured_shard_and_no_more():
    corpus = [answer(f"{number:03d}") for number in range(31)]
    captured = [shard_of(corpus[at : at + 3]) for at in range(0, 30, 3)]
    found = arrange(corpus, "i", captured, 15, 10)
    assert (len(found.shards), len(found.fresh)) == (10, 1)


@pytest.mark.parametrize("version", ["eagle3/shard-plan/2", "eagle3/shard-plan/4"])
def test_a_plan_of_another_version_is_refused_with_what_to_do(planned, version):
    artifact = load(planned.store, planned.refs[Kind.SHARD_PLAN])
    path = artifact.path("plan.json")
    text = path.read_text().replace("eagle3/shard-plan/3", version)
    staged = planned.tmp_path / "staged"
    staged.mkdir()
    (staged / "plan.json").write_text(text)
    ref = commit(planned.store, "plan_capture/new", staged, Kind.SHARD_PLAN)
    with pytest.raises(UnknownSchemaError, match=f"found '{version}'; run plan_capture again"):
        read_plan(load(planned.store, ref))
