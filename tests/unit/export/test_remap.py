"""Every dialect to every other and back: names, bytes, layer ids, shards, idempotence, atomic output."""

import fcntl
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle3_core.errors import ExportError
from eagle3_core.export import remap as module
from eagle3_core.export.dialects import DIALECTS
from eagle3_core.export.remap import remap
from tests.unit.export import tiny

NAMES = sorted(tiny.PREFIXES)
SGLANG_KEYS = [
    "d2t",
    "fc.weight",
    "lm_head.weight",
    "midlayer.hidden_norm.weight",
    "midlayer.input_layernorm.weight",
    "midlayer.mlp.down_proj.weight",
    "midlayer.mlp.gate_proj.weight",
    "midlayer.mlp.up_proj.weight",
    "midlayer.post_attention_layernorm.weight",
    "midlayer.self_attn.k_proj.weight",
    "midlayer.self_attn.o_proj.weight",
    "midlayer.self_attn.q_proj.weight",
    "midlayer.self_attn.v_proj.weight",
    "norm.weight",
    "t2d",
]
WITH_IDS = [name for name in NAMES if name not in ("eagle", "automodel")]


def go(source, out, to, **more):
    return remap(source, out, to, **{"target": tiny.target(), **more})


def outputs(config) -> list[int] | None:
    """Return the layers a config means for a Llama target of 8 layers, by the rules of those who read it."""
    if "aux_layers" in config:
        return config["aux_layers"]
    entries = config.get("eagle_aux_hidden_state_layer_ids")
    if entries is not None:
        return [layer - 1 for layer in entries]
    return config["eagle_config"].get("eagle_aux_hidden_state_layer_ids")


def test_there_is_a_tiny_drafter_for_every_dialect():
    assert set(NAMES) == set(DIALECTS)


def test_the_keys_sglang_reads_are_exactly_these(tmp_path):
    for name in NAMES:
        go(tiny.write(tmp_path / name, name), tmp_path / f"to-{name}", "sglang")
        assert sorted(tiny.read(tmp_path / f"to-{name}")) == SGLANG_KEYS, name


@pytest.mark.parametrize("to", NAMES)
@pytest.mark.parametrize("name", NAMES)
def test_every_dialect_goes_to_every_other_and_back_bit_for_bit(name, to, tmp_path):
    source = tiny.write(tmp_path / "in", name)
    there = go(source, tmp_path / "there", to)
    back = go(tmp_path / "there", tmp_path / "back", name)
    assert (there.plan.to.name, back.plan.source.dialect.name) == (to, to)
    assert tiny.same(tiny.read(tmp_path / "there"), {k: v for k, v in tiny.tensors(to).items()})
    assert tiny.same(tiny.read(tmp_path / "back"), tiny.tensors(name))
    go(tmp_path / "back", tmp_path / "again", to)
    assert tiny.content(tmp_path / "again") == tiny.content(tmp_path / "there")


@pytest.mark.parametrize("to", NAMES)
@pytest.mark.parametrize("name", WITH_IDS)
def test_layer_ids_mean_the_same_layers_everywhere(name, to, tmp_path):
    go(tiny.write(tmp_path / "in", name), tmp_path / "out", to)
    assert outputs(tiny.read_config(tmp_path / "out")) == tiny.OUTPUTS


def test_vllm_counts_the_layer_entered_and_reads_it_at_top_level(tmp_path):
    go(tiny.write(tmp_path / "in", "sglang"), tmp_path / "out", "vllm")
    config = tiny.read_config(tmp_path / "out")
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert "eagle_config" not in config


def test_no_ids_stay_no_ids_because_every_engine_has_the_same_default(tmp_path):
    remap(tiny.write(tmp_path / "in", "eagle"), tmp_path / "out", "vllm")
    assert "eagle_aux_hidden_state_layer_ids" not in tiny.read_config(tmp_path / "out")


@pytest.mark.parametrize("name", NAMES)
def test_what_we_wrote_needs_no_target_and_no_hint_to_be_read_again(name, tmp_path):
    go(tiny.write(tmp_path / "in", "sglang"), tmp_path / "first", name)
    if name != "own":  # our own format has no place for the number of layers
        assert remap(tmp_path / "first", tmp_path / "second", "speculators").plan.source.dialect.name == name
    assert remap(tmp_path / "first", tmp_path / "third", name).plan.source.dialect.name == name
    assert tiny.content(tmp_path / "third") == tiny.content(tmp_path / "first")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pair=st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)),
    used=st.sets(st.integers(0, tiny.V - 1), min_size=1, max_size=tiny.V),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
    seed=st.integers(0, 9),
    embedding=st.booleans(),
)
def test_any_vocabulary_and_precision_survives_the_round_trip(tmp_path_factory, pair, used, dtype, seed, embedding):
    name, to = pair
    used = tuple(sorted(used))
    if name == "modelopt" and len(used) > 1 and all(b - a > 1 for a, b in itertools.pairwise(used)):
        return  # offsets that rise everywhere are refused without a t2d, see test_refusals
    values = tiny.tensors(name, used, dtype, seed)
    if embedding:
        root = tiny.PREFIXES[name][1]
        values[f"{root}embed_tokens.weight"] = torch.rand(tiny.V, tiny.D).to(dtype)
    base = tmp_path_factory.mktemp("pair")
    source = tiny.write(base / "in", name, values, draft_vocab_size=len(used))
    go(source, base / "there", to)
    go(base / "there", base / "back", name)
    assert tiny.same(tiny.read(base / "back"), values)


@pytest.mark.parametrize("wrap", ["_orig_mod.{}", "module.{}", "module._orig_mod.{}"])
def test_wrappers_are_taken_off_and_the_bytes_stay(wrap, tmp_path):
    plain = tiny.tensors("vllm")
    wrapped = {key if key in ("d2t", "t2d") else wrap.format(key): value for key, value in plain.items()}
    done = go(tiny.write(tmp_path / "in", "vllm", wrapped), tmp_path / "out", "sglang")
    assert tiny.same(tiny.read(tmp_path / "out"), tiny.tensors("sglang"))
    assert done.summary()["renamed"][wrap.format("fc.weight")] == "fc.weight"


def test_a_wrapper_inside_a_name_is_taken_off_too(tmp_path):
    values = {key.replace("midlayer.", "midlayer._orig_mod."): value for key, value in tiny.tensors("sglang").items()}
    go(tiny.write(tmp_path / "in", "sglang", values), tmp_path / "out", "sglang")
    assert sorted(tiny.read(tmp_path / "out")) == SGLANG_KEYS


@pytest.mark.parametrize("to", [name for name in NAMES if name != "own"])
def test_shards_stay_shards_with_an_index_of_the_new_names(to, tmp_path):
    source = tiny.shard(tiny.write(tmp_path / "in", "automodel"), 3)
    go(source, tmp_path / "out", to)
    assert tiny.same(tiny.read(tmp_path / "out"), tiny.tensors(to))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    for name in sorted(set(index["weight_map"].values())):
        held = {key for key, file in index["weight_map"].items() if file == name}
        assert held == set(tiny.load_file(tmp_path / "out" / name))
    go(tmp_path / "out", tmp_path / "back", "automodel")
    assert tiny.same(tiny.read(tmp_path / "back"), tiny.tensors("automodel"))


def test_a_second_run_finds_the_same_and_other_content_is_never_replaced(tmp_path):
    source = tiny.write(tmp_path / "in", "vllm")
    assert not go(source, tmp_path / "out", "sglang").already
    before = tiny.content(tmp_path / "out")
    assert go(source, tmp_path / "out", "sglang").already
    (tmp_path / "out" / "config.json").write_text("{}")
    with pytest.raises(ExportError, match="nothing is overwritten"):
        go(source, tmp_path / "out", "sglang")
    assert (tmp_path / "out" / "config.json").read_text() == "{}"
    assert tiny.content(tmp_path / "out").keys() == before.keys()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_a_file_where_the_output_should_go_is_not_replaced(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ExportError, match="nothing is overwritten"):
        go(tiny.write(tmp_path / "in", "vllm"), tmp_path / "out", "sglang")
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize("out", ["x/../in", "in/out", "in/deep/out"])
def test_the_source_is_no_output_and_has_none_in_it(out, tmp_path):
    source = tiny.write(tmp_path / "in", "vllm")
    before = tiny.content(source)
    with pytest.raises(ExportError, match="expected a directory outside the source"):
        go(source, tmp_path / out, "sglang")
    assert tiny.content(source) == before
    assert not go(source, tmp_path / "in-sglang", "sglang").already


def test_what_a_dead_run_left_is_found_whatever_the_outputs_name_and_nobody_elses_is(tmp_path):
    source, others = tiny.write(tmp_path / "in", "vllm"), tmp_path / ".ab.01234567.tmp"
    others.mkdir()
    (tmp_path / ".a[b]*.01234567.tmp").mkdir()
    go(source, tmp_path / "a[b]*", "sglang")
    go(source, tmp_path / "*", "sglang")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["*", others.name, "a[b]*", "in"]


def test_a_run_that_dies_while_writing_leaves_no_output_and_the_next_one_sweeps_up(tmp_path):
    source = tiny.write(tmp_path / "in", "vllm")
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom eagle3_core.export.remap import remap\n"
        "remap(Path(sys.argv[1]), Path(sys.argv[2]), 'sglang', told='vllm', on_bytes=lambda count: os._exit(9))"
    )
    config = json.loads((source / "config.json").read_text())
    del config["eagle_aux_hidden_state_layer_ids"]
    (source / "config.json").write_text(json.dumps(config))
    died = subprocess.run([sys.executable, "-c", code, source, tmp_path / "out"], check=False)
    assert died.returncode == 9
    assert not (tmp_path / "out").exists()
    assert len(list(tmp_path.glob(".out.*.tmp"))) == 1
    go(source, tmp_path / "out", "sglang")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.parametrize("call", [(os, "open"), (fcntl, "flock")])
def test_a_directory_that_another_run_sweeps_up_before_it_is_locked_is_made_again(call, tmp_path, monkeypatch):
    plain, swept = getattr(*call), []

    def after_the_other_run(first, *rest, **more):
        fresh = list(tmp_path.glob(".out.*.tmp"))
        if fresh and not swept:
            swept.append(fresh)
            shutil.rmtree(fresh[0])
        return plain(first, *rest, **more)

    monkeypatch.setattr(*call, after_the_other_run)
    go(tiny.write(tmp_path / "in", "vllm"), tmp_path / "out", "sglang")
    assert swept
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.parametrize("call", [(os, "open"), (fcntl, "flock")])
def test_what_was_left_over_may_vanish_while_it_is_swept_up(call, tmp_path, monkeypatch):
    left, plain = tmp_path / ".out.01234567.tmp", getattr(*call)
    left.mkdir()

    def after_the_other_run(first, *rest, **more):
        if left.exists():
            left.rmdir()
        return plain(first, *rest, **more)

    source = tiny.write(tmp_path / "in", "vllm")
    plan = module.make_plan

    def planned(*arguments):  # what reads the source opens files too
        made = plan(*arguments)
        monkeypatch.setattr(*call, after_the_other_run)
        return made

    monkeypatch.setattr(module, "make_plan", planned)
    go(source, tmp_path / "out", "sglang")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_a_staging_directory_is_removed_before_it_is_let_go(tmp_path, monkeypatch):
    source = tiny.write(tmp_path / "in", "vllm")
    go(source, tmp_path / "out", "sglang")
    plain, held = shutil.rmtree, []

    def removing(path, *rest, **more):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held.append(path)
        os.close(descriptor)
        return plain(path, *rest, **more)

    monkeypatch.setattr(shutil, "rmtree", removing)
    assert go(source, tmp_path / "out", "sglang").already
    assert len(held) == 1


def test_the_output_is_named_from_where_one_is(tmp_path, monkeypatch):
    source = tiny.write(tmp_path / "in", "vllm")
    (tmp_path / "out" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "out" / "deep")
    with pytest.raises(ExportError, match="other content"):
        go(source, Path(".."), "sglang")
    with pytest.raises(ExportError, match="the one you are in"):
        go(source, Path(), "sglang")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
    assert list((tmp_path / "out" / "deep").iterdir()) == []


def test_files_are_on_disk_before_they_have_their_name(tmp_path, monkeypatch):
    synced = []
    plain = os.fsync
    monkeypatch.setattr(module.os, "fsync", lambda descriptor: (synced.append(os.fstat(descriptor).st_ino),
                                                                plain(descriptor))[1])  # fmt: skip
    go(tiny.write(tmp_path / "in", "vllm"), tmp_path / "out", "sglang")
    written = {path.stat().st_ino for path in (tmp_path / "out").iterdir()}
    assert written <= set(synced)
    assert {(tmp_path / "out").stat().st_ino, tmp_path.stat().st_ino} <= set(synced)


def test_a_whole_file_is_never_read_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("eagle3_core.export.source.CHUNK", 64)
    seen = []
    go(tiny.write(tmp_path / "in", "vllm"), tmp_path / "out", "sglang", on_bytes=seen.append)
    assert max(seen) <= 64
    assert sum(seen) == sum(value.nbytes for value in tiny.tensors("sglang").values())
    assert tiny.same(tiny.read(tmp_path / "out"), tiny.tensors("sglang"))


def test_the_output_is_a_file_the_library_would_have_written(tmp_path):
    go(tiny.write(tmp_path / "in", "vllm"), tmp_path / "out", "sglang")
    tiny.save_file(tiny.tensors("sglang"), tmp_path / "library.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "library.safetensors").read_bytes()


def test_a_full_vocabulary_needs_no_map_but_ours_has_one(tmp_path):
    values = tiny.tensors("sglang", range(tiny.V))
    del values["d2t"], values["t2d"]
    source = tiny.write(tmp_path / "in", "sglang", values, draft_vocab_size=tiny.V)
    go(source, tmp_path / "vllm", "vllm")
    assert not {"d2t", "t2d"} & set(tiny.read(tmp_path / "vllm"))
    go(source, tmp_path / "own", "own")
    made = tiny.read(tmp_path / "own")
    assert made["t2d"].all()
    assert not made["d2t"].any()


def test_a_tied_head_becomes_a_tensor_of_its_own(tmp_path):
    values = tiny.tensors("sglang", range(tiny.V))
    values["embed_tokens.weight"] = values.pop("lm_head.weight")
    source = tiny.write(tmp_path / "in", "sglang", values, draft_vocab_size=None, tie_word_embeddings=True)
    done = go(source, tmp_path / "out", "sglang")
    made = tiny.read(tmp_path / "out")
    assert torch.equal(made["lm_head.weight"], made["embed_tokens.weight"])
    assert tiny.read_config(tmp_path / "out")["tie_word_embeddings"] is False
    assert any("made from embed_tokens" in note for note in done.plan.notes)


def test_norms_of_eagle_3_1_travel_under_both_old_and_new_names(tmp_path):
    values = tiny.tensors("sglang")
    for place, name in enumerate(("low", "mid", "high")):
        values[f"aux_norm_{name}.weight"] = torch.full((tiny.D,), float(place)).bfloat16()
    go(tiny.write(tmp_path / "in", "sglang", values, use_aux_norm=True), tmp_path / "out", "automodel")
    made = tiny.read(tmp_path / "out")
    assert [float(made[f"model.fc_norm.{place}.weight"][0]) for place in range(3)] == [0.0, 1.0, 2.0]
    assert tiny.read_config(tmp_path / "out")["fc_norm"] is True


def test_no_tensor_library_is_needed():
    code = "import sys, eagle3_core.cli.remap; print(sorted({'torch', 'numpy', 'safetensors'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert shown.strip() == "[]"
