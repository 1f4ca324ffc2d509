"""What `remap --to sglang` writes is what the installed SGLang's class asks for: used == available == required."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eagle3_core.engine.launch import CPU_SITE
from eagle3_core.export.remap import remap
from tests.unit.export import tiny

SCRIPT = Path(__file__).with_name("sglang_class.py")
SOURCES = ("own", "vllm", "speculators", "automodel")
LEFT = "blocks"
LATENT = ("sglang", "sglang-new", "modelopt")
READ_BY_SGLANG = ("sglang", "sglang-new", "specforge", "eagle", "modelopt", "automodel")


def probe(directories):
    """Return what SGLang's class did with each drafter, all in one process."""
    path = os.pathsep.join([str(CPU_SITE), str(Path.cwd())])
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "SGLANG_USE_CPU_ENGINE": "1",
                   "TORCHDYNAMO_DISABLE": "1"}  # fmt: skip
    done = subprocess.run([sys.executable, SCRIPT, *directories], env=environment, capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Return what SGLang's class did with drafters of several dialects."""
    root = tmp_path_factory.mktemp("sglang")
    made = {}
    for name in SOURCES:
        source = tiny.write(root / f"from-{name}", name, tiny.tensors(name, dtype=torch.float32))
        made[name, "sglang"] = remap(source, root / f"{name}-sglang", "sglang", target=tiny.target()).out
    for to in READ_BY_SGLANG:
        made["own", to] = remap(root / "from-own", root / f"own-to-{to}", to, target=tiny.target()).out
    own = tiny.tensors("own", dtype=torch.float32, mla=True)
    tiny.write(root / "latent", "own", own, **tiny.latent("own"))
    for to in LATENT:
        made["mla", to] = remap(root / "latent", root / f"mla-to-{to}", to, target=tiny.target()).out
    made["no", "remap"] = tiny.write(root / "blocks", "sglang", {
        key.replace("midlayer.", "blocks.0."): value
        for key, value in tiny.tensors("sglang", dtype=torch.float32).items()
    })  # fmt: skip
    return dict(zip(made, probe(made.values()), strict=True))


@pytest.mark.parametrize("name", [(name, "sglang") for name in SOURCES] + [("own", to) for to in READ_BY_SGLANG]
                         + [("mla", to) for to in LATENT])  # fmt: skip
def test_every_parameter_is_filled_and_every_key_is_used(name, loaded):
    found = loaded[name]
    # The embedding is the target's: SGLang replaces it after loading.
    assert found["uninitialised"] == ["model.embed_tokens.weight"]
    assert [key for key, names in found["touched"].items() if not names and key != "t2d"] == []
    used = {name for names in found["touched"].values() for name in names}
    assert used == set(found["required"]) - {"model.embed_tokens.weight"} | {"hot_token_id"}
    assert found["target_ids"] == tiny.USED


def test_the_class_asks_for_the_shapes_we_check(loaded):
    required = loaded["own", "sglang"]["required"]
    assert required["model.fc.weight"] == [tiny.D, 3 * tiny.D]
    assert required["lm_head.weight"][0] >= len(tiny.USED)
    assert required["model.layers.0.self_attn.qkv_proj.weight"] == [(tiny.H + 2 * tiny.G) * tiny.WIDTH, 2 * tiny.D]
    assert required["model.layers.0.mlp.gate_up_proj.weight"] == [2 * tiny.F, tiny.D]


def test_the_class_with_mla_asks_for_the_shapes_we_check(loaded):
    required = loaded["mla", "sglang"]["required"]
    attention = {name.rsplit(".", 2)[1]: shape for name, shape in required.items() if "self_attn" in name}
    first = [tiny.LATENT_PARTS[f"self_attn.{name}"] for name in ("q_a_proj", "kv_a_proj_with_mqa")]
    assert attention.pop("fused_qkv_a_proj_with_mqa") == [first[0][0] + first[1][0], 2 * tiny.D]
    assert attention == {
        name.removeprefix("self_attn."): list(shape) for name, shape in tiny.LATENT_PARTS.items() if shape not in first
    }


def test_the_test_sees_what_the_class_drops_and_leaves(loaded):
    found = loaded["no", "remap"]
    assert found["touched"]["blocks.0.mlp.down_proj.weight"] == []
    assert "model.layers.0.mlp.down_proj.weight" in found["uninitialised"]
