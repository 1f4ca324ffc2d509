"""From prompts to a sealed feature set through the real stages, with an engine that is pure arithmetic."""

import json
import threading

import pytest
import torch

from eagle3_core.artifacts import Kind
from eagle3_core.config import RunConfig
from eagle3_core.data.corpus import read_corpus, read_prompt_set
from eagle3_core.data.encoding import label_rows
from eagle3_core.data.features import FeatureSet
from eagle3_core.data.plan import read_plan, read_samples
from eagle3_core.data.shards import ShardWriter
from eagle3_core.errors import (
    CaptureMismatchError,
    ConfigError,
    EngineDiedError,
    EngineVersionError,
    InputError,
    StorageFullError,
    TargetError,
)
from eagle3_core.progress import Progress
from eagle3_core.repair import inspect
from eagle3_core.storage import load
from eagle3_core.train.loader import batches
from eagle3_core.vocab import VocabMap


def changed(config, section, **values):
    dumped = config.model_dump(mode="json")
    dumped[section] |= values
    return RunConfig.parse(dumped, "test")


# ---------------------------------------------------------------------------------------------------------- prepare
def test_the_split_depends_on_each_prompt_alone(flow, prompts_file):
    before = {p.messages[0]["content"]: p.held_out for p in read_prompt_set(load(flow.store, flow.run("prepare")))}
    more = [json.dumps({"prompt": f"Another question {number}"}) + "\n" for number in range(30)]
    prompts_file.write_text("".join(more) + prompts_file.read_text())
    after = {p.messages[0]["content"]: p.held_out for p in read_prompt_set(load(flow.store, flow.run("prepare")))}
    assert len(before) == 40
    assert before.items() <= after.items()
    assert len(after) == 70


def test_prepare_counts_duplicates_and_prompts_that_are_too_long(flow, prompts_file):
    extra = [{"prompt": "question  NUMBER 3?"}, {"prompt": "x" * 500}, {"prompt": "y" * 500}]
    prompts_file.write_text(prompts_file.read_text() + "".join(json.dumps(line) + "\n" for line in extra))
    facts = load(flow.store, flow.run("prepare")).manifest.facts
    assert (facts["given"], facts["duplicates"], facts["too_long"], facts["prompts"]) == (43, 1, 2, 40)
    assert facts["target"]["model_class"] == "LlamaForCausalLM"


def test_prepare_takes_the_same_prompts_however_the_file_is_ordered(flow, prompts_file):
    flow.config = changed(flow.config, "data", max_prompts=20)
    first = {p.id for p in read_prompt_set(load(flow.store, flow.run("prepare")))}
    prompts_file.write_text("".join(sorted(prompts_file.read_text().splitlines(keepends=True), reverse=True)))
    assert {p.id for p in read_prompt_set(load(flow.store, flow.run("prepare")))} == first
    assert len(first) == 20


def test_prepare_refuses_an_empty_split_and_names_a_fraction_that_helps(flow):
    flow.config = changed(flow.config, "data", held_out_fraction=1e-6)
    with pytest.raises(InputError, match=r"set data.held_out_fraction above 0\.\d+") as caught:
        flow.run("prepare")
    fraction = float(str(caught.value).partition("above ")[2].split()[0])
    flow.config = changed(flow.config, "data", held_out_fraction=fraction + 1e-4)
    assert flow.run("prepare").facts["held_out"] == 1


def test_prepare_refuses_prompts_that_are_all_too_long(flow):
    flow.config = changed(flow.config, "data", max_sample_tokens=32)
    with pytest.raises(InputError, match=r"of at most 16 tokens, found none \(40 are longer\)"):
        flow.run("prepare")


# ------------------------------------------------------------------------------------------------------- regenerate
def test_the_corpus_holds_the_servers_own_ids_and_says_who_wrote_them(flow, engine):
    prompts = {p.id: p for p in read_prompt_set(load(flow.store, flow.run("prepare")))}
    corpus = load(flow.store, flow.run("regenerate"))
    answers = list(read_corpus(corpus))
    assert [answer.id for answer in answers] == sorted(prompts)
    assert all(answer.input_ids == prompts[answer.id].input_ids for answer in answers)
    assert all(answer.output_ids[-1] == 256 for answer in answers)
    assert corpus.manifest.facts["generated_by"]["fingerprint"] == {"sglang": "test"}


def test_a_killed_regeneration_loses_less_than_a_chunk_and_repeats_no_committed_answer(flow, engine):
    flow.run("prepare")
    engine.fail_after = 29
    with pytest.raises(EngineDiedError):
        flow.run("regenerate")
    assert len(engine.answered) == 29
    engine.fail_after = None
    flow.run("regenerate")
    # 24 of the 29 answers were committed in chunks of 8; the other 5 are asked again.
    assert len(engine.answered) == 29 + 16
    assert len(set(engine.answered)) == 40


def test_when_all_chunks_are_there_no_engine_starts_and_the_corpus_is_the_same(flow, engine, tmp_path):
    flow.run("prepare")
    first = flow.run("regenerate")
    (tmp_path / "root" / first.key / "manifest.json").unlink()
    assert flow.run("regenerate") == first
    assert engine.starts == 1


def test_a_damaged_chunk_is_put_aside_and_its_prompts_are_asked_again(flow, engine, tmp_path):
    flow.run("prepare")
    first = flow.run("regenerate")
    (tmp_path / "root" / first.key / "manifest.json").unlink()
    chunk = min((tmp_path / "root" / "regenerate" / "answers").glob("*/*/corpus.jsonl"))
    chunk.write_text(chunk.read_text()[:-40])
    assert flow.run("regenerate") == first
    assert len(engine.answered) == 40 + 8
    assert flow.store.list_keys("quarantine")


def test_every_turn_of_a_conversation_is_answered_after_the_answer_before(flow, prompts_file):
    lines = [json.dumps({"turns": [f"First {n}", f"Then {n}"]}) + "\n" for n in range(10)]
    prompts_file.write_text(prompts_file.read_text() + "".join(lines))
    prompts = {p.id for p in read_prompt_set(load(flow.store, flow.run("prepare")))}
    answers = {answer.id: answer for answer in read_corpus(load(flow.store, flow.run("regenerate")))}
    second = {name for name in answers if "." in name}
    assert len(prompts) == 50
    assert len(second) == 10
    for name in second:
        first = answers[name.partition(".")[0]]
        spoken = [*first.input_ids, *[token for token in first.output_ids if token < 256], 256]
        assert answers[name].input_ids[: len(spoken)] == spoken
        assert answers[name].held_out == first.held_out


def test_empty_answers_are_counted_and_dropped(flow, engine):
    flow.run("prepare")
    engine.says_nothing = lambda index: index % 2
    facts = load(flow.store, flow.run("regenerate")).manifest.facts
    assert (facts["samples"], facts["empty"]) == (20, 20)


def test_nothing_but_empty_answers_is_an_error_that_counts_them(flow, engine):
    flow.run("prepare")
    engine.says_nothing = lambda index: True
    with pytest.raises(InputError, match="40/40 samples have no supervised token"):
        flow.run("regenerate")


def test_a_target_that_changed_since_prepare_answers_nothing(flow, engine, tiny_target):
    flow.run("prepare")
    (tiny_target / "generation_config.json").write_text("{}")
    with pytest.raises(TargetError, match="found another config"):
        flow.run("regenerate")
    assert engine.answered == []


# ------------------------------------------------------------------------------------------------------ build_vocab
def test_the_vocabulary_holds_the_end_and_covers_the_answers(flow):
    from safetensors.torch import load_file

    for name in ("prepare", "regenerate"):
        flow.run(name)
    ref = flow.run("build_vocab")
    tensors = load_file(load(flow.store, ref).path("vocab.safetensors"))
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    vocab = VocabMap.from_offsets(tensors["d2t"].tolist(), tensors["t2d"].tolist())
    assert {256, 257, 258} <= set(vocab.target_ids)
    assert 0.5 < ref.facts["coverage_held_out"] <= 1


def test_another_size_is_another_vocabulary_and_asks_the_target_nothing(flow, engine):
    for name in ("prepare", "regenerate"):
        flow.run(name)
    answered = len(engine.answered)
    refs = []
    for size in (100, 150):
        flow.config = changed(flow.config, "drafter", draft_vocab_size=size)
        refs.append(flow.run("build_vocab"))
    assert [ref.facts["draft_vocab_size"] for ref in refs] == [100, 150]
    assert refs[0].key != refs[1].key
    assert len(engine.answered) == answered


def test_a_vocabulary_that_covers_too_little_names_the_size_that_would_do(flow):
    for name in ("prepare", "regenerate"):
        flow.run(name)
    flow.config = changed(flow.config, "drafter", draft_vocab_size=16, min_coverage=0.99)
    with pytest.raises(ConfigError, match="would suffice") as caught:
        flow.run("build_vocab")
    size = int(str(caught.value).partition("; ")[2].split()[0])
    flow.config = changed(flow.config, "drafter", draft_vocab_size=size)
    assert flow.run("build_vocab").facts["coverage_held_out"] >= 0.99


def test_a_vocabulary_larger_than_the_targets_is_refused(flow):
    for name in ("prepare", "regenerate"):
        flow.run(name)
    flow.config = changed(flow.config, "drafter", draft_vocab_size=261)
    with pytest.raises(ConfigError, match="at most the target's 260"):
        flow.run("build_vocab")


# ----------------------------------------------------------------------------------------------------- plan_capture
def test_the_plan_holds_every_sample_once_in_shards_within_the_bound(planned):
    artifact = load(planned.store, planned.refs[Kind.SHARD_PLAN])
    plan, samples = read_plan(artifact), read_samples(artifact)
    answers = list(read_corpus(load(planned.store, planned.refs[Kind.CORPUS])))
    assert [sample.id for sample in samples] == [answer.id for answer in answers]
    assert [name for shard in plan.shards for name in shard.sample_ids] == [answer.id for answer in answers]
    assert all(shard.tokens <= 256 for shard in plan.shards)
    assert plan.aux_layers == (1, 3, 4)
    facts = planned.refs[Kind.SHARD_PLAN].facts
    assert facts["tokens"] == sum(answer.length for answer in answers)
    # Every token has aux hidden states, its id and its mask, those a label needs the last hidden state too.
    labels = sum(shard.label_rows for shard in plan.shards)
    assert 0 < labels < facts["tokens"]
    assert facts["bytes"] == facts["tokens"] * (3 * 8 * 4 + 5) + labels * 8 * 4


def test_there_are_never_more_shards_than_tasks(planned):
    planned.config = changed(planned.config, "capture", max_tasks=3)
    assert planned.run("plan_capture").facts["num_shards"] <= 3


def test_shards_that_are_stored_or_computed_otherwise_are_other_shards(planned):
    keys = {planned.shard_key(0)}
    for change in ({"fp8": "aux"}, {"fp8": "all"}, {"last_rows": "all"}, {"dtype": "bfloat16"}, {"prefill_tokens": 64}):
        planned.config = changed(planned.config, "capture", **change)
        planned.run("plan_capture")
        keys.add(planned.shard_key(0))
    assert len(keys) == 6


def test_a_plan_that_would_not_fit_is_refused_with_the_figures(planned):
    planned.config = changed(planned.config, "capture", shard_tokens=300, reserve_bytes=1 << 60)
    with pytest.raises(StorageFullError, match=r"a reserve of 1,152,921,504,606,846,976, found [\d,]+ free"):
        planned.run("plan_capture")


# ---------------------------------------------------------------------------------------------------------- capture
@pytest.mark.parametrize("last_rows", ["labels", "all"])
@pytest.mark.parametrize("fp8", ["none", "aux", "all"])
def test_a_feature_set_gives_back_what_the_engine_computed(planned, engine, fp8, last_rows):
    planned.config = changed(planned.config, "capture", fp8=fp8, last_rows=last_rows)
    planned.run("plan_capture")
    planned.capture_all()
    plan, written = planned.refs[Kind.SHARD_PLAN], planned.run("seal")
    assert [finding.state for finding in inspect(planned.store, plan, lambda _count: None)] == ["ok"] * 5
    features = FeatureSet.open(planned.store, written)
    answers = {answer.id: answer for answer in read_corpus(load(planned.store, planned.refs[Kind.CORPUS]))}
    assert len(features) == len(answers)
    # Three bits of mantissa.
    aux_error, last_error = (2**-4 if fp8 in known else 0.0 for known in (("aux", "all"), ("all",)))
    for position, name in enumerate(features.sample_ids):
        answer, sample = answers[name], features.read(position).restored()
        ids = torch.tensor(answer.input_ids + answer.output_ids)
        assert torch.equal(sample.input_ids, ids)
        assert sample.loss_mask.tolist() == [False] * len(answer.input_ids) + [True] * len(answer.output_ids)
        torch.testing.assert_close(sample.aux_hidden_states, engine.states(ids, 24), rtol=aux_error, atol=2e-5)
        rows = torch.arange(len(ids)) if last_rows == "all" else label_rows(sample.loss_mask)
        wanted = torch.full((len(ids), 8), torch.nan)
        wanted[rows] = engine.states(ids + 7, 8)[rows]
        torch.testing.assert_close(
            sample.last_hidden_state, wanted, rtol=last_error, atol=2e-5 if last_error else 0, equal_nan=True
        )
        assert features.lengths[position] == answer.length
        assert features.supervised[position] == len(answer.output_ids)
        assert features.held_out[position] == answer.held_out
        assert features.domains[features.domain[position]] == answer.domain
    assert features.aux_layers == (1, 3, 4)
    assert features.target["model_class"] == "LlamaForCausalLM"


@pytest.mark.parametrize("last_rows", ["labels", "all"])
@pytest.mark.parametrize("fp8", ["aux", "all"])
def test_states_in_8_bits_travel_to_training_in_8_bits_and_arrive_as_they_would_restored(
    planned, monkeypatch, fp8, last_rows
):
    planned.config = changed(planned.config, "capture", fp8=fp8, last_rows=last_rows)
    planned.run("plan_capture")
    planned.capture_all()
    features = FeatureSet.open(planned.store, planned.run("seal"))
    sent, real = [], torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor, "to", lambda tensor, *to, **how: sent.append((tensor, to)) or real(tensor, *to, **how)
    )
    device = torch.device("cpu")
    [batch] = batches(features, [(3, 0, 7)], device, torch.float32)
    kinds = [tensor.dtype for tensor, to in sent if to == (device,)]
    assert kinds.count(torch.float8_e4m3fn) == (2 if fp8 == "all" else 1)
    samples = [features.read(sample).restored() for sample in (3, 0, 7)]
    assert torch.equal(batch.aux_hidden_states, torch.cat([sample.aux_hidden_states for sample in samples]))
    last = torch.cat([sample.last_hidden_state for sample in samples])
    torch.testing.assert_close(batch.last_hidden_state, last, rtol=0, atol=0, equal_nan=True)
    assert bool(last.isnan().any()) == (last_rows == "labels")


def test_one_engine_captures_ahead_and_no_sample_is_captured_twice(planned, engine):
    planned.capture_all()
    answers = [tuple(a.input_ids + a.output_ids) for a in read_corpus(load(planned.store, planned.refs[Kind.CORPUS]))]
    shards = planned.refs[Kind.SHARD_PLAN].facts["num_shards"]
    assert engine.starts == 2  # one to answer, one to capture
    assert len(engine.captured) == len(answers) + 3 * shards  # and three canaries a shard
    assert set(engine.captured) == set(answers)


def test_a_shard_that_another_task_works_on_is_left_to_it(planned, monkeypatch):
    told = []
    monkeypatch.setattr(Progress, "update", lambda _self, done, total, *_, **__: told.append((done, total)))
    with planned.store.claim(planned.shard_key(2)) as theirs:
        assert theirs
        planned.run("capture", 0)
    states = [finding.state for finding in inspect(planned.store, planned.refs[Kind.SHARD_PLAN])]
    assert states == ["ok", "ok", "missing", "ok", "ok"]
    assert told[-1][0] == told[-1][1], "its tokens are none of ours"


def test_a_committed_shard_is_returned_without_an_engine(planned, engine):
    refs = planned.capture_all()
    engine.fail_after = 0
    assert planned.capture_all() == refs


def test_the_shards_name_is_the_one_that_seal_and_repair_look_for(planned):
    ref = planned.run("capture", 1)
    assert ref.key == planned.shard_key(1)


def test_a_shard_nobody_asked_this_task_for_cannot_fail_it(planned, engine):
    first = read_plan(load(planned.store, planned.refs[Kind.SHARD_PLAN])).shards[0]
    engine.fail_after = len(first.sample_ids) + 3 + 2
    assert planned.run("capture", 0).facts["tokens"] == first.tokens
    engine.fail_after = None
    planned.capture_all()
    assert planned.run("seal").facts["shards"] == planned.refs[Kind.SHARD_PLAN].facts["num_shards"]


@pytest.mark.parametrize("number", ["middle", "last"])
@pytest.mark.parametrize("which", ["aux", "last"])
def test_a_canary_that_comes_back_different_fails_the_shard(planned, engine, number, which):
    first = read_plan(load(planned.store, planned.refs[Kind.SHARD_PLAN])).shards[0]
    size = len(first.sample_ids)
    at = {"middle": 1 + size // 2, "last": size + 2}[number]

    def other_rows(index, aux, last):
        if index != at:
            return aux, last
        return (aux.roll(1, 0), last) if which == "aux" else (aux, last.roll(1, 0))

    engine.disturb = other_rows
    with pytest.raises(CaptureMismatchError, match="the engine mixes up requests"):
        planned.run("capture", 0)


@pytest.mark.parametrize(
    ("disturb", "words"),
    [
        (lambda n, aux, last: (aux[:-1], last[:-1]), "expected shape"),
        (lambda n, aux, last: (aux[:, :16], last), "expected shape"),
    ],
)
def test_lost_rows_and_wrong_widths_fail_the_shard(planned, engine, disturb, words):
    engine.disturb = lambda n, aux, last: disturb(n, aux, last) if n == 2 else (aux, last)
    with pytest.raises(CaptureMismatchError, match=words):
        planned.run("capture", 0)


def spoil(engine):
    """The second sample of the first shard gets a NaN, the third an infinity; the first request is the canary."""

    def disturb(_number, aux, last):
        if len(engine.captured) == 2:
            last[-2, 1] = torch.nan
        if len(engine.captured) == 3:
            aux[4] = torch.inf
        return aux, last

    engine.disturb = disturb


@pytest.mark.parametrize("fp8", ["none", "all"])
def test_a_sample_whose_states_are_not_finite_is_kept_apart_and_teaches_nothing(planned, engine, fp8):
    planned.config = changed(planned.config, "capture", fp8=fp8, max_bad_samples=0.4)
    planned.run("plan_capture")
    bad = set(read_plan(load(planned.store, planned.refs[Kind.SHARD_PLAN])).shards[0].sample_ids[1:3])
    spoil(engine)
    planned.capture_all()
    sealed = planned.run("seal")
    features = FeatureSet.open(planned.store, sealed)
    found = load(planned.store, sealed).manifest.facts
    assert set(found["not_finite_samples"]) == bad
    assert found["not_finite"] == 2
    assert found["supervised"] == int(features.supervised.sum())
    for position, name in enumerate(features.sample_ids):
        sample = features.read(position).restored()
        assert bool(sample.loss_mask.any()) == (features.supervised[position] > 0) == (name not in bad)
        assert torch.isfinite(sample.aux_hidden_states).all()
        assert torch.isfinite(sample.last_hidden_state[label_rows(sample.loss_mask)]).all()


@pytest.mark.parametrize(("share", "allowed"), [(0.0, 0), (0.001, 1)])
def test_more_samples_that_are_not_finite_than_allowed_fail_the_shard(planned, engine, monkeypatch, share, allowed):
    monkeypatch.setattr("eagle3_core.data.shards.WAITING_BYTES", 0)
    planned.config = changed(planned.config, "capture", max_bad_samples=share)
    spoil(engine)
    with pytest.raises(
        CaptureMismatchError, match=rf"{allowed + 1} samples .* not finite in float32, {allowed} are allowed"
    ):
        planned.run("capture", 0)


def test_a_bad_sample_that_is_found_after_the_last_was_handed_over_counts_too(planned, engine, monkeypatch):
    real, every = ShardWriter._store, threading.Event()

    def late(writer, *sample):
        every.wait(20)
        return real(writer, *sample)

    def checksums(writer):
        every.set()
        return real_checksums(writer)

    real_checksums = ShardWriter.checksums
    monkeypatch.setattr(ShardWriter, "_store", late)
    monkeypatch.setattr(ShardWriter, "checksums", checksums)
    planned.config = changed(planned.config, "capture", max_bad_samples=0.0)
    spoil(engine)
    with pytest.raises(CaptureMismatchError, match=r"2 samples .* not finite in float32, 0 are allowed"):
        planned.run("capture", 0)


def test_values_too_large_for_the_stored_precision_are_refused(planned, engine):
    planned.config = changed(planned.config, "capture", dtype="float16")
    planned.run("plan_capture")
    engine.disturb = lambda n, aux, last: (aux * 1e6, last)
    with pytest.raises(
        CaptureMismatchError, match=r"not finite in float16, 1 are allowed .* choose a wider capture.dtype"
    ):
        planned.run("capture", 0)


def test_another_engine_than_the_plans_is_refused(planned, monkeypatch):
    monkeypatch.setattr("eagle3_core.engine.fingerprint.require_known_good", lambda _device: {"sglang": "newer"})
    with pytest.raises(EngineVersionError, match=r"engine fingerprint .*newer.*run plan_capture again"):
        planned.run("capture", 0)


def test_another_target_than_the_plans_is_refused(planned, tiny_target):
    (tiny_target / "generation_config.json").write_text("{}")
    with pytest.raises(TargetError, match="found another config"):
        planned.run("capture", 0)


def test_capture_stops_at_the_reserve_and_goes_on_after_space_is_freed(planned):
    planned.config = changed(planned.config, "capture", reserve_bytes=1 << 60)
    with pytest.raises(StorageFullError, match="committed shards are kept"):
        planned.run("capture", 0)
    planned.config = changed(planned.config, "capture", reserve_bytes=0)
    planned.capture_all()
    planned.run("seal")
