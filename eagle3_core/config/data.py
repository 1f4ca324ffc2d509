"""Prompts, their answers, and the hidden states captured from them."""

from __future__ import annotations

import datetime
from typing import Literal, Self

from pydantic import Field, model_validator

from eagle3_core.config.base import NOT_IDENTITY, Section


class DataConfig(Section):
    """Which prompts the target answers, and how long the answers may be."""

    prompts: str = Field(
        description="JSONL file of prompts: {prompt} or {messages:[{role,content}]} or {turns:[...]}, "
        "optional id and domain; or a directory of such files. `demo` is the set that ships with the project.",
        json_schema_extra=NOT_IDENTITY,
    )
    window_days: int | None = Field(
        None,
        ge=1,
        le=3650,
        description="Of a directory whose file names hold a date (2026-11-29 or 20261129), use only those of so many "
        "days. Empty: all its files.",
        json_schema_extra=NOT_IDENTITY,
    )
    until: datetime.date | None = Field(
        None,
        description="The last day of the window. Empty: yesterday in UTC, as the run begins.",
        json_schema_extra=NOT_IDENTITY,
    )
    max_prompts: int | None = Field(None, ge=8, description="Use at most this many prompts (chosen by content hash).")
    held_out_fraction: float = Field(0.05, gt=0, lt=0.5, description="Share kept for evaluation, by content hash.")
    system_prompt: str | None = Field(None, description="System message put before every prompt that has none.")
    max_new_tokens: int = Field(512, ge=8, le=131072, description="Longest answer, in tokens.")
    max_sample_tokens: int = Field(4096, ge=32, le=1048576, description="Longest prompt plus answer, in tokens.")
    temperature: float = Field(0.0, ge=0, le=2, description="Sampling temperature of the answers; 0 is greedy.")
    chunk_prompts: int = Field(
        128, ge=1, le=100000, description="Prompts answered between two commits.", json_schema_extra=NOT_IDENTITY
    )

    @model_validator(mode="after")
    def _only_a_window_has_an_end(self) -> Self:
        if self.until is not None and self.window_days is None:
            raise ValueError(f"until {self.until}: expected window_days too; set data.window_days, or leave it out")
        return self

    def at(self, today: datetime.date) -> Self:
        """Return the same with the window's last day filled in."""
        if self.window_days is None or self.until is not None:
            return self
        return self.model_copy(update={"until": today - datetime.timedelta(days=1)})

    @property
    def days(self) -> tuple[datetime.date, datetime.date] | None:
        """Return the first and last day of the window; None: there is no window."""
        if self.window_days is None:
            return None
        assert self.until is not None, "see `at`"
        return self.until - datetime.timedelta(days=self.window_days - 1), self.until


class CaptureConfig(Section):
    """What reads the hidden states, how they are cut into shards, and how they are stored."""

    backend: Literal["sglang", "transformers"] = Field(
        "sglang",
        description="What captures; transformers, sample by sample, for a target whose hidden states SGLang "
        "does not hand out.",
    )

    shard_tokens: int = Field(65536, ge=256, le=10**8, description="Upper bound of tokens in one shard.")
    max_tasks: int = Field(1024, ge=1, le=1024, description="Upper bound of mapped capture tasks; shards grow instead.")
    prefill_tokens: int = Field(
        8192, ge=64, le=10**6, description="Tokens of samples that share a prefill of the target, always the same ones."
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field("bfloat16", description="Precision of stored states.")
    fp8: Literal["none", "aux", "all"] = Field(
        "none",
        description="States stored as 8-bit floats, with a scale per token and layer: none, the aux hidden "
        "states, or the last hidden state too.",
    )
    last_rows: Literal["labels", "all"] = Field(
        "labels",
        description="Tokens whose last hidden state is stored: those a loss can read, or all.",
    )
    max_bad_samples: float = Field(
        0.001,
        ge=0,
        lt=1,
        description="Share of a shard's samples, one at least unless it is 0, whose states may hold NaN "
        "or infinity; nothing is learnt from them.",
        json_schema_extra=NOT_IDENTITY,
    )
    reserve_bytes: int = Field(
        1 << 30, ge=0, description="Free space the root must keep, in bytes.", json_schema_extra=NOT_IDENTITY
    )
