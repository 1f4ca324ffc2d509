"""The export stage, from a committed checkpoint to a committed drafter."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_core.artifacts import Kind
from eagle3_core.config import RunConfig
from eagle3_core.context import StageContext
from eagle3_core.errors import ExportError
from eagle3_core.export.dialects import DIALECTS
from eagle3_core.export.directory import materialise
from eagle3_core.export.plan import TargetFacts
from eagle3_core.export.remap import remap
from eagle3_core.identity import target_fingerprint
from eagle3_core.model.architecture import DrafterArchitecture
from eagle3_core.pipeline import STAGES
from eagle3_core.progress import Progress
from eagle3_core.stages import export
from eagle3_core.storage import commit, load
from eagle3_core.storage.local import LocalStore

TARGET = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 40,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def target(tmp_path):
    directory = tmp_path / "target"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(TARGET))
    (directory / "tokenizer.json").write_text("{}")
    save_file({"model.embed_tokens.weight": torch.zeros(40, 16)}, directory / "model.safetensors")
    return directory


def context_of(tmp_path, target, sha256=None, dtype="float32", **tensors):
    sizes = DrafterArchitecture(
        hidden_size=16, intermediate_size=24, num_heads=2, num_kv_heads=2, head_dim=8, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, max_position_embeddings=64, vocab_size=40,
        draft_vocab_size=4, aux_layers=(1, 3, 4), target_class="LlamaForCausalLM",
        target_sha256=sha256 or target_fingerprint(target).sha256,
    )  # fmt: skip
    staged = tmp_path / "staged"
    staged.mkdir(exist_ok=True)
    own = {name: torch.ones(shape) * 0.1 for name, shape in sizes.parameter_shapes().items()}
    save_file({**own, **tensors}, staged / "drafter.safetensors")
    flags = torch.zeros(40, dtype=torch.bool)
    flags[[3, 7, 9, 20]] = True
    save_file({"d2t": torch.tensor([3, 6, 7, 17]), "t2d": flags}, staged / "vocab.safetensors")
    (staged / "drafter_config.json").write_text(sizes.model_dump_json())
    store = LocalStore(tmp_path / "root")
    ref = commit(store, "train/a", staged, Kind.CHECKPOINT)
    run = RunConfig.parse({"target": {"model": str(target), "dtype": dtype}, "data": {"prompts": "demo"}}, "test")
    work = tmp_path / "work"
    work.mkdir(exist_ok=True)
    progress = Progress("export", None)
    return StageContext(STAGES["export"], run, store, {"checkpoint": ref}, None, work, progress)


def test_the_drafter_is_committed_once_and_found_again(tmp_path, target):
    context = context_of(tmp_path, target)
    ref = export.run(context)
    assert ref.kind == Kind.DRAFTER
    assert ref.facts["parameters"] > 0
    assert sorted(load(context.store, ref).manifest.files) == ["config.json", "model.safetensors"]
    assert export.run(context) == ref


def test_weights_are_written_in_the_precision_they_are_served_in(tmp_path, target):
    context = context_of(tmp_path, target, dtype="bfloat16")
    directory = materialise(load(context.store, export.run(context)), tmp_path / "drafter")
    assert load_file(directory / "model.safetensors")["midlayer.mlp.up_proj.weight"].dtype == torch.bfloat16
    assert json.loads((directory / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("to", sorted(set(DIALECTS) - {"sglang"}))
def test_what_was_exported_becomes_every_dialect_without_being_told_the_target(to, tmp_path, target):
    context = context_of(tmp_path, target)
    directory = materialise(load(context.store, export.run(context)), tmp_path / "drafter")
    block = json.loads((directory / "config.json").read_text())["eagle3"]
    assert block == {"dialect": "sglang", "aux_layers": [1, 3, 4], "target_class": "LlamaForCausalLM",
                     "target_layers": 8, "target_sha256": target_fingerprint(target).sha256}  # fmt: skip
    there = remap(directory, tmp_path / "there", to).out
    # A checkpoint of our own does not hold the number of the target's layers.
    known = TargetFacts(TARGET, "the target", lambda: block["target_sha256"]) if to == "own" else None
    back = remap(there, tmp_path / "back", "sglang", target=known).out
    assert (back / "model.safetensors").read_bytes() == (directory / "model.safetensors").read_bytes()


def test_a_drafter_of_another_target_is_refused(tmp_path, target):
    with pytest.raises(ExportError, match="which the drafter was trained for"):
        export.run(context_of(tmp_path, target, sha256="f" * 64))


def test_nothing_is_committed_when_a_key_is_unknown(tmp_path, target):
    context = context_of(tmp_path, target, **{"_orig_mod.fc.weight": torch.zeros(1)})
    with pytest.raises(ExportError, match=r"found both _orig_mod\.fc\.weight and fc\.weight"):
        export.run(context)
    assert context.done({"dtype": "float32"}) is None
