"""How SGLang is launched, for every stage that needs it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from eagle3_core.config.base import NOT_IDENTITY, Section

EngineArg = bool | int | float | str


class ServingConfig(Section):
    """Few knobs of our own; everything else passes through to SGLang."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: the GPU where there is one.")
    tensor_parallel: int = Field(1, ge=1, le=64, description="GPUs the target is spread over.")
    max_running_requests: int = Field(16, ge=1, le=4096, description="Requests the engine runs at once.")
    max_total_tokens: int | None = Field(None, ge=512, description="KV cache size in tokens; empty: SGLang decides.")
    engine_args: dict[str, EngineArg] = Field(
        default_factory=dict,
        description="Further SGLang flags without the dashes, e.g. {mem-fraction-static: 0.8}; checked against the "
        "installed version before any launch.",
    )
    silence_s: float = Field(
        600.0,
        ge=10,
        description="Longest silence of a server that starts or owes answers: seconds without an answer or a new "
        "line in its log. A start may take as long as it likes.",
        json_schema_extra=NOT_IDENTITY,
    )
    share_gpus: bool = Field(
        False,
        description="Start beside processes of others on the same GPUs, which is refused otherwise.",
        json_schema_extra=NOT_IDENTITY,
    )
    threads: int = Field(
        2, ge=1, le=1024, description="CPU threads of one engine on a CPU.", json_schema_extra=NOT_IDENTITY
    )

    @property
    def flags(self) -> dict[str, EngineArg]:
        """Return `engine_args` by SGLang's names, however they are spelled there."""
        return {name.lstrip("-").replace("_", "-"): value for name, value in self.engine_args.items()}
