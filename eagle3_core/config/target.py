"""The frozen large model that the drafter serves."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from eagle3_core.config.base import NOT_IDENTITY, Section


class TargetConfig(Section):
    """Which target, in which precision, and which of its layers feed the drafter."""

    model: str = Field(
        description="Directory of the target: config.json, safetensors weights, tokenizer, chat template. "
        "`demo` is the tiny chat target that ships with the project.",
        json_schema_extra=NOT_IDENTITY,
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16", description="Precision in which the target is served and captured."
    )
    aux_layers: tuple[int, ...] | None = Field(
        None,
        description="Decoder layers whose OUTPUT feeds the drafter, counted from 0, low to high. "
        "Empty: [1, n/2-1, n-4].",
        min_length=1,
        max_length=5,
    )
