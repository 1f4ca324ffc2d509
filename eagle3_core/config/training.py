"""How the drafter is trained."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from eagle3_core.config.base import NOT_IDENTITY, Section


def host_and_port(text: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`; the next port has to exist too, since machines meet there.

    Raises:
        ValueError: it is not that.
    """
    host, _, port = text.rpartition(":")
    if not host or any(map(str.isspace, host)) or not port.isdecimal() or not 1 <= int(port) < 65535:
        raise ValueError(f"rdzv_endpoint: expected HOST:PORT with a port of 1 to 65534, found {text!r}")
    return host, int(port)


class TrainingConfig(Section):
    """Optimisation, TTT, packing, checkpoints."""

    learning_rate: float = Field(1e-4, gt=0, le=1, description="Peak learning rate, for example 3e-5.")
    start_from: Literal["scratch", "champion"] = Field(
        "scratch",
        description="What the first weights are: fresh ones, or those of the champion, the drafter that is released "
        "under this name for this target. Without a champion: fresh ones.",
        json_schema_extra=NOT_IDENTITY,
    )
    warm_learning_rate: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Peak learning rate of a run that starts from a champion, usually lower. Empty: learning_rate.",
        json_schema_extra=NOT_IDENTITY,
    )
    epochs: float = Field(2.0, gt=0, le=1000, description="Passes over the training samples; fractions are fine.")
    batch_tokens: int = Field(8192, ge=64, le=4_194_304, description="Tokens of one optimiser step, over all ranks.")
    row_tokens: int = Field(
        8192, ge=64, le=1_048_576, description="Length of one packed row; a longer sample has its own."
    )
    ttt_steps: int = Field(7, ge=1, le=16, description="TTT unroll depth: draft positions trained.")
    step_decay: float = Field(0.8, gt=0, le=1, description="Loss weight of TTT step s is step_decay ** s.")
    loss: Literal["kl", "lk"] = Field("kl", description="Forward KL to the target, or the acceptance loss LK.")
    warmup_fraction: float = Field(0.02, ge=0, lt=1, description="Share of the steps with rising learning rate.")
    weight_decay: float = Field(0.0, ge=0, le=1, description="AdamW weight decay.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW betas.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradient norm bound.")
    max_bad_steps: int = Field(20, ge=0, description="Skipped steps with NaN or infinite gradients before stopping.")
    seed: int = Field(0, ge=0, description="Seed of initialisation and order.")
    precision: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="Compute precision; weights stay float32."
    )
    validations: int = Field(4, ge=1, le=1000, description="Validations on held-out samples, the last at the end.")
    patience: int | None = Field(
        None, ge=1, description="End after so many validations in a row without a better held-out tau."
    )
    checkpoint_every_s: float = Field(
        120.0, gt=0, description="Seconds between checkpoints.", json_schema_extra=NOT_IDENTITY
    )
    cache_bytes: int = Field(
        64 << 30,
        ge=0,
        description="Disk space of a machine for what is read from a bucket, and never more than half of what is free; "
        "shards that do not fit are read again in every epoch, sample by sample. A directory root needs none.",
        json_schema_extra=NOT_IDENTITY,
    )
    checkpoint_every_tokens: int | None = Field(
        None, gt=0, description="Tokens between checkpoints, in addition.", json_schema_extra=NOT_IDENTITY
    )
    rank_timeout_s: float = Field(
        300.0, gt=0, description="A rank that hangs so long ends the attempt; the next one resumes.",
        json_schema_extra=NOT_IDENTITY,
    )  # fmt: skip
    trackers: tuple[Literal["tensorboard", "mlflow", "wandb"], ...] = Field(
        ("tensorboard",),
        description="Where figures go beside metrics.jsonl; mlflow and wandb have to be installed, and read their own "
        "environment variables (MLFLOW_TRACKING_URI, WANDB_MODE).",
        json_schema_extra=NOT_IDENTITY,
    )
    nproc: int = Field(
        2, ge=1, le=1024, description="Processes torchrun starts on each machine.", json_schema_extra=NOT_IDENTITY
    )
    nodes: int = Field(
        1, ge=1, le=1024, description="Machines that train together: that of the train task, and others that run "
        "`eagle3 train-node HOST:PORT`.",
        json_schema_extra=NOT_IDENTITY,
    )  # fmt: skip
    rdzv_endpoint: str | None = Field(
        None, description="HOST:PORT of the machine of the train task, where the others find it; "
        "the next port is used too. Needed with several nodes.",
        json_schema_extra=NOT_IDENTITY,
    )  # fmt: skip

    @model_validator(mode="after")
    def _others_can_find_us(self) -> Self:
        if self.rdzv_endpoint is not None:
            host_and_port(self.rdzv_endpoint)
        if self.nodes > 1 and self.rdzv_endpoint is None:
            raise ValueError(f"training.nodes {self.nodes} needs training.rdzv_endpoint, HOST:PORT of this machine")
        return self

    def of_start(self, *, warm: bool) -> Self:
        """Return the same with the learning rate of its start."""
        if not warm or self.warm_learning_rate is None:
            return self
        return self.model_copy(update={"learning_rate": self.warm_learning_rate})
