"""Tiny drafters as their own tools write them: keys and configs spelled out here, not taken from the dialect tables."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from eagle3_core.export.plan import TargetFacts

PREFIXES = {
    "own": ("layer.", ""),
    "sglang": ("midlayer.", ""),
    "specforge": ("midlayer.", ""),
    "eagle": ("midlayer.", ""),
    "sglang-new": ("layers.0.", ""),
    "vllm": ("layers.0.", ""),
    "modelopt": ("layers.0.", ""),
    "speculators": ("layers.0.", ""),
    "automodel": ("model.layers.0.", "model."),
}
D, F, H, G, WIDTH, V = 16, 24, 4, 2, 4, 40
USED = [3, 4, 9, 20]
LAYERS = 8
OUTPUTS = [1, 3, 4]
SHAPES = {
    "fc": (D, 3 * D), "norm": (D,), "hidden_norm": (D,), "input_layernorm": (D,), "post_attention_layernorm": (D,),
    "mlp.down_proj": (D, F), "mlp.gate_proj": (F, D), "mlp.up_proj": (F, D), "self_attn.k_proj": (G * WIDTH, 2 * D),
    "self_attn.v_proj": (G * WIDTH, 2 * D), "self_attn.q_proj": (H * WIDTH, 2 * D), "self_attn.o_proj": (D, H * WIDTH),
}  # fmt: skip
LATENT = {"q_lora_rank": 6, "kv_lora_rank": 5, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 7}
LATENT_PARTS = {
    "self_attn.q_a_proj": (6, 2 * D), "self_attn.kv_a_proj_with_mqa": (5 + 2, 2 * D), "self_attn.q_a_layernorm": (6,),
    "self_attn.kv_a_layernorm": (5,), "self_attn.q_b_proj": (H * (3 + 2), 6), "self_attn.kv_b_proj": (H * (3 + 7), 5),
    "self_attn.o_proj": (D, H * 7),
}  # fmt: skip
YARN = {"factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0}
LATENT_DIALECTS = ("own", "sglang", "sglang-new", "vllm", "modelopt")
TARGET = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": D, "vocab_size": V, "num_hidden_layers": LAYERS,
    "max_position_embeddings": 4096, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def target(**changes) -> TargetFacts:
    return TargetFacts({**TARGET, **changes}, "the target", lambda: "a" * 64)


def tensors(name: str, used=tuple(USED), dtype=torch.bfloat16, seed=0, mla=False) -> dict[str, torch.Tensor]:
    layer, root = PREFIXES[name]
    generator = torch.Generator().manual_seed(seed)
    shapes = {part: shape for part, shape in SHAPES.items() if not (mla and "self_attn" in part)}
    shapes |= LATENT_PARTS if mla else {}
    values = {part: torch.randn(shape, generator=generator).to(dtype) for part, shape in shapes.items()}
    head = torch.randn((len(used), D), generator=generator).to(dtype)
    flags = torch.zeros(V, dtype=torch.bool)
    flags[list(used)] = True
    found = {f"{layer}{part}.weight": values[part] for part in sorted(values) if part not in ("fc", "norm")}
    found |= {f"{root}fc.weight": values["fc"], f"{root}norm.weight": values["norm"], "lm_head.weight": head}
    found["d2t"] = torch.tensor(used) - torch.arange(len(used))
    return found if name == "modelopt" else {**found, "t2d": flags}


def llama(**changes) -> dict:
    return {
        "model_type": "llama", "hidden_size": D, "intermediate_size": F, "num_hidden_layers": 1,
        "num_attention_heads": H, "num_key_value_heads": G, "head_dim": WIDTH, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "vocab_size": V, "max_position_embeddings": 512, "rope_theta": 5e5, **changes,
    }  # fmt: skip


def latent(name: str, **changes) -> dict:
    """Return what a config of that dialect says otherwise of a drafter with MLA, in Kimi's own words."""
    if name == "own":
        rope = {"rope_type": "yarn", "rope_theta": 5e5, **YARN}
        return {"num_kv_heads": H, "head_dim": 5, "mla": LATENT, "schema_version": "eagle3/drafter/2",
                "rope_parameters": rope, **changes}  # fmt: skip
    return {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2", "num_key_value_heads": H,
            "head_dim": None, **LATENT, "rope_scaling": {"type": "yarn", **YARN}, **changes}  # fmt: skip


def config(name: str, **changes) -> dict:
    """Return a config of that dialect, with the aux layers OUTPUTS in its own numbers and place."""
    entries = [layer + 1 for layer in OUTPUTS]
    nested_ids = {"eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": OUTPUTS}}
    flat = {"architectures": ["LlamaForCausalLMEagle3"], **llama(), "draft_vocab_size": len(USED)}
    found = {
        "sglang": {**flat, **nested_ids},
        "specforge": {**flat, **nested_ids, "torch_dtype": "bfloat16"},
        "eagle": {**flat, "architectures": ["LlamaForCausalLM"], "torch_dtype": "float16"},
        "sglang-new": {**flat, **nested_ids},
        "vllm": {**flat, "architectures": ["Eagle3LlamaForCausalLM"], "eagle_aux_hidden_state_layer_ids": entries},
        "modelopt": {**flat, **nested_ids},
        "automodel": flat,
        "speculators": {
            "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": len(USED),
            "norm_before_residual": False, "eagle_aux_hidden_state_layer_ids": entries,
            "transformer_layer_config": llama(),
        },
        "own": {
            "hidden_size": D, "intermediate_size": F, "num_heads": H, "num_kv_heads": G, "head_dim": WIDTH,
            "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            "max_position_embeddings": 512, "vocab_size": V, "draft_vocab_size": len(USED), "aux_layers": OUTPUTS,
            "target_sha256": "a" * 64, "target_class": "LlamaForCausalLM",
        },
    }[name]  # fmt: skip
    return {**found, **changes}


def write(directory: Path, name: str, values: dict[str, torch.Tensor] | None = None, **changes) -> Path:
    """Write a drafter of that dialect; a change of None takes a config key away."""
    directory.mkdir(parents=True)
    values = tensors(name) if values is None else values
    kept = {key: value for key, value in config(name, **changes).items() if value is not None}
    if name == "own":
        maps = {key: values[key] for key in ("d2t", "t2d") if key in values}
        save_file({key: value for key, value in values.items() if key not in maps}, directory / "drafter.safetensors")
        save_file(maps, directory / "vocab.safetensors")
        (directory / "drafter_config.json").write_text(json.dumps(kept))
    else:
        save_file(values, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(kept))
    return directory


def shard(directory: Path, parts: int) -> Path:
    """Cut `model.safetensors` into shards with an index, as transformers does."""
    whole = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weight_map = {}
    for number in range(parts):
        name = f"model-{number + 1:05}-of-{parts:05}.safetensors"
        part = {key: whole[key] for key in sorted(whole)[number::parts]}
        save_file(part, directory / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def read(directory: Path) -> dict[str, torch.Tensor]:
    """Return every tensor below a directory, read by the safetensors library."""
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= load_file(path)
    return found


def read_config(directory: Path) -> dict:
    own = directory / "drafter_config.json"
    return json.loads((own if own.exists() else directory / "config.json").read_text())


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Tell whether names, dtypes, shapes and bytes are equal."""
    return left.keys() == right.keys() and all(
        left[key].dtype == right[key].dtype
        and left[key].shape == right[key].shape
        and torch.equal(left[key].view(torch.uint8), right[key].view(torch.uint8))
        for key in left
    )
