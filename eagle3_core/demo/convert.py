"""Write a SmolLM2 GGUF file as a Hugging Face directory: weights in bfloat16, tokenizer, chat template, configuration.

V vocabulary, D width, F width of the MLP.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eagle3_core.demo import smollm2
from eagle3_core.demo.smollm2 import SmolLM2

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if loop.first and message['role'] != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' -}}
{%- endif -%}
{%- if message['role'] == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}
{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
{{- '\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""The file's own template, word for word, plus the markers that tell transformers which tokens the assistant wrote."""

_TOP = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(gguf: Path, directory: Path) -> None:
    """Write everything transformers and SGLang need into `directory`, which is created where missing.

    Raises:
        TargetError: the file is not a Llama with tied embeddings.
    """
    model = smollm2.load(gguf, "cpu", torch.bfloat16)
    directory.mkdir(parents=True, exist_ok=True)
    weights = {_hugging_face_name(name): weight.contiguous() for name, weight in model.weights.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    model.tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    ids = {"bos_token_id": model.bos, "eos_token_id": model.eos, "pad_token_id": model.pad}
    _dump(directory / "config.json", {**_config(model), **ids})
    _dump(directory / "generation_config.json", ids)
    _dump(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": model.tokenizer.id_to_token(model.bos),
            "eos_token": model.tokenizer.id_to_token(model.eos),
            "pad_token": model.tokenizer.id_to_token(model.pad),
            "model_max_length": model.context,
            "clean_up_tokenization_spaces": False,
        },
    )


def _hugging_face_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    layer, part = name.split(".")
    return f"model.layers.{layer}.{_LAYER[part]}.weight"


def _config(model: SmolLM2) -> dict[str, Any]:
    vocab_size, width = model.weights["embed"].shape
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": model.weights["0.ffn_gate"].shape[0],
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": width // model.heads,
        "vocab_size": vocab_size,
        "max_position_embeddings": model.context,
        "rope_theta": model.rope_theta,
        "rms_norm_eps": round(model.norm_eps, 10),
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
    }


def _dump(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
