"""Everything that can be checked in seconds, before any hour is spent."""

from __future__ import annotations

import json
import platform
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3_core.artifacts import Ref
from eagle3_core.checks import aux_layers, check_inputs
from eagle3_core.config import RunConfig
from eagle3_core.config.base import canonical_sha256
from eagle3_core.context import StageContext
from eagle3_core.data.plan import capture_decides, capture_identity
from eagle3_core.data.prompts import named, selection_rank, split, unique
from eagle3_core.data.reuse import captured_shards
from eagle3_core.engine import gpus
from eagle3_core.engine.backend import capture_engine, refuse_other_states
from eagle3_core.engine.effective import validate
from eagle3_core.engine.fingerprint import require_known_good
from eagle3_core.engine.launch import LaunchPlan
from eagle3_core.engine.layers import engine_layer_ids
from eagle3_core.engine.platform import check_sampling, resolve_device
from eagle3_core.errors import Eagle3Error, PreflightError, StorageFullError
from eagle3_core.estimate import feature_bytes_per_token
from eagle3_core.export.configs import write_config
from eagle3_core.export.dialects import DIALECTS
from eagle3_core.export.facts import DrafterFacts
from eagle3_core.identity import read_config, read_target, resolve_target, target_fingerprint
from eagle3_core.model.architecture import DrafterArchitecture
from eagle3_core.progress import Progress
from eagle3_core.prompt_files import checked_prompts, prompt_files
from eagle3_core.prompts import read_prompts
from eagle3_core.storage import ObjectStore
from eagle3_core.train.destinations import require_trackers
from eagle3_core.train.start import require_start
from eagle3_core.train.trial import try_training


def run(context: StageContext) -> Ref:
    """Run the quick checks, then the slow ones if those found nothing; never reused, because machines change.

    Raises:
        PreflightError: lists what is wrong, one clause each: all that the quick checks found, or all of the slow ones.
    """
    check_inputs(context.run, context.store)
    found: dict[str, Any] = {}
    for checks in (_quick(context), _slow(context)):
        found |= _made(checks, context.progress)
    staged = context.staged()
    (staged / "preflight.json").write_text(json.dumps(found, indent=1, default=str), encoding="utf-8")
    context.progress.update(len(found), len(found), "checks")
    shown = {"checks": ", ".join(found), "attention": found["flags"]["attention"], **found["held-out split"],
             "evaluation": context.run.evaluation.told}  # fmt: skip
    return context.commit(staged, ref_facts=shown, replace=True)


def _quick(context: StageContext) -> dict[str, Callable[[], Any]]:
    """Return the checks that read files and ask the machine: a second for all of them."""
    config, store = context.run, context.store
    return {
        "trackers": lambda: require_trackers(config.training.trackers),
        "shared memory": _shared_memory,
        "sampling": lambda: check_sampling(config.evaluation.temperatures, resolve_device(config.serving.device)),
        "host": lambda: {"python": platform.python_version(), "device": resolve_device(config.serving.device)},
        "drafter": lambda: _drafter(config),
        "warm start": lambda: require_start(config, store, _sizes(config)),
        "engine": lambda: require_known_good(),
        "gpus": lambda: _gpus(config),
        "held-out split": lambda: _split(config),
        "space": lambda: _space(config, store),
    }


def _slow(context: StageContext) -> dict[str, Callable[[], Any]]:
    """Return the checks that import a library of models, compile or ask SGLang, the longest last: up to a minute."""
    config = context.run
    return {
        "template": lambda: _template(config),
        "training step": lambda: try_training(config, _sizes(config), resolve_device(config.serving.device)),
        "flags": lambda: _flags(context),
    }


def _made(checks: Mapping[str, Callable[[], Any]], progress: Progress) -> dict[str, Any]:
    """Return what each check found.

    Raises:
        PreflightError: lists what is wrong.
    """
    found: dict[str, Any] = {}
    problems: list[str] = []
    for name, check in checks.items():
        progress.phase(f"checking {name}")
        try:
            found[name] = check()
        except Eagle3Error as error:
            # Several checks need the drafter's sizes, say; what is wrong with them is told once.
            if str(error) not in problems:
                problems.append(str(error))
    if problems:
        raise PreflightError("; ".join(problems))
    return found


def _drafter(config: RunConfig) -> dict[str, Any]:
    """Derive the drafter's sizes and layer ids: what training or export would refuse of a target is refused here."""
    directory = resolve_target(config)
    shape = read_target(directory)
    layers = aux_layers(config.target, shape)
    sizes = _sizes(config)
    if config.capture.backend == "transformers":
        refuse_other_states(shape.model_class)
    ids = engine_layer_ids(layers, shape.model_class, shape.num_layers)
    return {"aux_layers": layers, "layer_ids": ids, "heads": sizes.num_heads, "head_dim": sizes.head_dim}


def _sizes(config: RunConfig) -> DrafterArchitecture:
    directory = resolve_target(config)
    shape = read_target(directory)
    return DrafterArchitecture.for_target(
        read_config(directory), config.drafter, aux_layers=aux_layers(config.target, shape),
        draft_vocab_size=config.drafter.vocab_size(shape.vocab_size), target_sha256="",
    )  # fmt: skip


def _space(config: RunConfig, store: ObjectStore) -> dict[str, int | None]:
    """Compare the most the features can take with what the root has free."""
    shape = read_target(resolve_target(config))
    prompts = checked_prompts(prompt_files(config))
    count = min(prompts, config.data.max_prompts or prompts)
    layers = aux_layers(config.target, shape)
    # Expected, not the worst case: half of the longest answer, plus a prompt of 64 tokens.
    tokens = count * (64 + config.data.max_new_tokens // 2)
    per_token = feature_bytes_per_token(shape.hidden_size, len(layers), config.capture.dtype, config.capture.fp8)
    need, free = tokens * per_token, store.free_bytes()
    if free is not None and free < need + config.capture.reserve_bytes:
        # Looked up only where it matters: naming the target by content can take minutes the first time.
        need = max(0, tokens - _captured_tokens(config, store, layers)) * per_token
    if free is not None and free < need + config.capture.reserve_bytes:
        raise StorageFullError(
            f"{store.root}: expected about {need:,} bytes of hidden states plus a reserve of "
            f"{config.capture.reserve_bytes:,}, found {free:,} free; free space or lower data.max_prompts"
        )
    return {"need_bytes": need, "free_bytes": free}


def _split(config: RunConfig) -> dict[str, int]:
    """Count what the prompts will be split into, as `prepare` does; it may yet leave some out as too long."""
    files, data = prompt_files(config), config.data
    given = [named(prompt, data.system_prompt) for path in files for prompt in read_prompts(path)]
    distinct = sorted(unique(given), key=selection_rank)
    chosen = split(distinct[: data.max_prompts], data.held_out_fraction)
    chosen.check(data.prompts, data.held_out_fraction)
    config.evaluation.require_prompts(chosen.held_out)
    return {"train": chosen.train, "held_out": chosen.held_out, "duplicates": len(given) - len(distinct)}


def _captured_tokens(config: RunConfig, store: ObjectStore, layers: Sequence[int]) -> int:
    """Return how many tokens are captured already in shards that a plan of this run may use again."""
    engine = capture_engine(config)
    target = target_fingerprint(resolve_target(config))
    identity = capture_identity(capture_decides(config, target, layers, engine))
    return sum(sum(index.lengths) for index in captured_shards(store, identity))


def _template(config: RunConfig) -> dict[str, Any]:
    from eagle3_core.data.chat import check_template

    return {"probe_answer_tokens": check_template(resolve_target(config), config.data.system_prompt)}


def _flags(context: StageContext) -> dict[str, Any]:
    """Ask the installed SGLang about every launch this run will make; answers are kept by content."""
    config = context.run
    target = resolve_target(config)
    shape = read_target(target)
    layers = aux_layers(config.target, shape)
    plans = {"serve": LaunchPlan.serve(target, config.target.dtype, config.serving)}
    if config.capture.backend == "sglang":
        plans["capture"] = LaunchPlan.capture(
            target, config.target.dtype, config.serving, layers, config.data.max_sample_tokens,
            config.capture.prefill_tokens,
        )  # fmt: skip
    engine = require_known_good()
    with tempfile.TemporaryDirectory() as drafter:
        _write_config(config, Path(drafter), shape.num_layers)
        plans["speculate"] = LaunchPlan.speculate(
            target, config.target.dtype, config.serving, Path(drafter), config.evaluation.primary_shape
        )
        accepted = {
            name: ["drafter" if part == drafter else part for part in plan.argv(0)] for name, plan in plans.items()
        }
        key = f"preflight/flags/{canonical_sha256([engine, accepted])[:24]}.json"
        if not context.store.exists(key):
            resolved = dict(zip(plans, validate(list(plans.values())), strict=True))
            context.store.write_bytes(key, json.dumps(resolved, default=str).encode())
    return {"arguments": accepted, "attention": _attention(json.loads(context.store.read_bytes(key))["speculate"])}


def _attention(resolved: dict[str, Any]) -> str:
    """Return which attention SGLang picks for target and drafter; where that is wrong for a GPU, `engine_args` decide.

    The drafter takes the target's unless told otherwise, also where it has no kernels for that.
    """
    draft = resolved.get("speculative_draft_attention_backend") or "as the target"
    return f"{resolved.get('attention_backend') or 'as SGLang decides at its start'}, drafter {draft}"


def _write_config(config: RunConfig, directory: Path, target_layers: int) -> None:
    """Write what export will write of a drafter that is not trained yet; SGLang reads no weights to check arguments."""
    facts = DrafterFacts.of_architecture(_sizes(config)).model_copy(update={"target_layers": target_layers})
    values = write_config(facts, DIALECTS["sglang"], config.target.dtype, "the drafter to be trained")
    (directory / "config.json").write_text(json.dumps(values), encoding="utf-8")
    (directory / "model.safetensors").touch()


def _gpus(config: RunConfig) -> dict[str, Any]:
    """Ask who holds the GPUs; what is held now may be free later, and every launch asks again."""
    if resolve_device(config.serving.device) == "cpu" or config.serving.share_gpus:
        return {"asked": False}
    return {"asked": gpus.require_free(config.serving.tensor_parallel, within_s=0)}


def _shared_memory() -> dict[str, int]:
    free = shutil.disk_usage("/dev/shm").free
    if free < 64 << 20:
        raise StorageFullError(f"/dev/shm: expected 64 MiB free for NCCL and gloo, found {free:,} bytes; enlarge it")
    return {"free_bytes": free}
