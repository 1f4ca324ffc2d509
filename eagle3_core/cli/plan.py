"""`eagle3 plan`: bytes, tasks and GPU-hours before anything runs."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from eagle3_core.cli.common import (
    DEFAULT_ROOT,
    AsJson,
    Overrides,
    Root,
    configured,
    human_bytes,
    one_line_errors,
    output,
    print_json,
)
from eagle3_core.config import CaptureConfig, RunConfig
from eagle3_core.errors import ConfigError
from eagle3_core.estimate import Estimate, Workload, estimate
from eagle3_core.identity import read_config, resolve_target, target_shape
from eagle3_core.model.latent_sizes import latent_sizes
from eagle3_core.prompt_files import checked_prompts, prompt_files
from eagle3_core.storage import open_store


def plan(
    recipe: Annotated[str | None, typer.Argument(help="Recipe to plan; or give the sizes by options.")] = None,
    overrides: Overrides = None,
    samples: Annotated[int | None, typer.Option(help="Number of samples.", min=1)] = None,
    tokens: Annotated[float | None, typer.Option(help="Mean tokens of a sample.", min=1)] = None,
    hidden_size: Annotated[int | None, typer.Option(help="Hidden size of the target.", min=1)] = None,
    parameters: Annotated[float, typer.Option(help="Target parameters active per token, e.g. 32e9.", min=0)] = 0.0,
    root: Root = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Say what a run will need: bytes, tasks, GPU-hours, and whether the root has room."""
    with one_line_errors():
        if recipe is not None:
            config = configured(recipe, overrides)
            work = _from_recipe(config, samples, tokens)
            capture = config.capture
        elif samples and tokens and hidden_size:
            work = Workload(samples, round(samples * tokens), hidden_size, target_parameters=parameters)
            capture = CaptureConfig()
        else:
            raise ConfigError("plan: give a recipe, or --samples, --tokens and --hidden-size")
        result = estimate(work, shard_tokens=capture.shard_tokens, max_tasks=capture.max_tasks)
        free = open_store(root).free_bytes()
        if as_json:
            served = {} if recipe is None else {"evaluation": config.evaluation.told}
            print_json({"workload": asdict(work), "estimate": asdict(result), "free_bytes": free, **served})
            return
        guessed = _GUESS if recipe is not None and tokens is None else ""
        table = _table(work, result, free, guessed)
        if recipe is not None:
            table.add_row("evaluation", config.evaluation.told)
        output.print(table)


_PROMPT_TOKENS = 64
_GUESS = f"about: {_PROMPT_TOKENS} tokens a prompt, half of data.max_new_tokens an answer; better: --tokens"


def _from_recipe(config: RunConfig, samples: int | None, tokens: float | None) -> Workload:
    target = target_shape(config)
    if samples is None:
        prompts = checked_prompts(prompt_files(config))
        samples = min(prompts, config.data.max_prompts or prompts)
    # Unknown before the target answers.
    mean = tokens or _PROMPT_TOKENS + config.data.max_new_tokens / 2
    return Workload(
        samples=samples,
        tokens=round(samples * mean),
        hidden_size=target.hidden_size,
        num_aux=len(config.target.aux_layers or (0, 0, 0)),
        dtype=config.capture.dtype,
        fp8=config.capture.fp8,
        target_parameters=target.parameters,
        intermediate_size=config.drafter.intermediate_size or target.intermediate_size,
        draft_vocab_size=config.drafter.vocab_size(target.vocab_size),
        ttt_steps=config.training.ttt_steps,
        epochs=config.training.epochs,
        attention_parameters=_latent_parameters(config),
    )


def _latent_parameters(config: RunConfig) -> int:
    """Return the parameters of a drafter's multi-latent attention; 0 where it has none."""
    if config.drafter.attention != "mla":
        return 0
    target = read_config(resolve_target(config))
    text = target.get("text_config") or target
    shapes = latent_sizes(text, config.drafter).shapes(
        text["hidden_size"], config.drafter.num_heads or text["num_attention_heads"]
    )
    return sum(math.prod(shape) for shape in shapes.values())


def _table(work: Workload, result: Estimate, free: int | None, guessed: str) -> Table:
    table = Table(title="What the run will need", show_header=False)
    table.add_row("samples, tokens", f"{work.samples:,}, {work.tokens:,}" + f" ({guessed})" * bool(guessed))
    table.add_row("hidden states", f"{human_bytes(result.feature_bytes)} ({result.bytes_per_token:,} bytes a token)")
    table.add_row("capture tasks", f"{result.capture_tasks:,} for {result.shards:,} shards' worth of tokens")
    table.add_row(
        "capture", f"{_hours(result.capture_gpu_hours)} GPU-hours" if work.target_parameters else "give --parameters"
    )
    table.add_row(
        "training", f"{_hours(result.train_gpu_hours)} GPU-hours ({work.ttt_steps} TTT steps, {work.epochs} epochs)"
    )
    table.add_row("one checkpoint", human_bytes(result.checkpoint_bytes))
    room = "no limit" if free is None else human_bytes(free)
    short = free is not None and free < result.feature_bytes
    table.add_row("free at the root", f"[red]{room}: not enough[/]" if short else room)
    table.caption = "GPU-hours at 40 % of 790 TFLOP/s, one H200's bf16 matrix product."
    return table


def _hours(hours: float) -> str:
    return f"{hours:,.2f}" if hours >= 0.01 else "under 0.01"
