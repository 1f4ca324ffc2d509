"""What captures: SGLang, or transformers for a target whose hidden states SGLang does not hand out.

Both give the same shards; which one it was, in which version, is part of their name.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from eagle3_core.config import RunConfig
from eagle3_core.context import StageContext
from eagle3_core.data.plan import ShardPlan
from eagle3_core.engine import fingerprint, processes, spool
from eagle3_core.engine.launch import LaunchPlan
from eagle3_core.engine.layers import PART_OF_THE_OUTPUT
from eagle3_core.engine.platform import resolve_device
from eagle3_core.engine.spool import CapturedSample
from eagle3_core.errors import EngineArgsError
from eagle3_core.identity import read_target

_BESIDE_THE_POINT = ("mem-fraction-static", "base-gpu-id")
"""Flags of SGLang that say how much or where; any other may decide what a hidden state is."""


Capture = Callable[[Sequence[Sequence[int]]], Iterable[CapturedSample]]


def capture_engine(run: RunConfig) -> dict[str, str]:
    """Return what tells the engine of this run and this environment from others.

    Raises:
        EngineVersionError: SGLang is not one that the capture is proven with.
    """
    if run.capture.backend == "sglang":
        return {"backend": "sglang", **fingerprint.serving_engine(run.serving.device), **_launched(run)}
    known, device = _transformers_fingerprint(), resolve_device(run.serving.device)
    return {"backend": run.capture.backend, "fingerprint": known, "device": device}


def refuse_other_states(model_class: str) -> None:
    """Refuse to capture by transformers what SGLang would serve other states of.

    Raises:
        EngineArgsError: names the class.
    """
    if model_class in PART_OF_THE_OUTPUT:
        raise EngineArgsError(
            f"capture.backend: expected sglang for {model_class}, found transformers: SGLang hands a drafter what each "
            "layer's MLP adds, not the layer's output, so that acceptance would fall without an error"
        )


def _launched(run: RunConfig) -> dict[str, str]:
    """Return what else decides the bits of a state: quantisation, the attention backend, over how many GPUs sums go."""
    flags = {name: value for name, value in run.serving.flags.items() if name not in _BESIDE_THE_POINT}
    return {"tensor_parallel": str(run.serving.tensor_parallel), "engine_args": json.dumps(flags, sort_keys=True)}


def _transformers_fingerprint() -> str:
    digest = hashlib.sha256()
    for package in ("transformers", "torch"):
        digest.update(f"{package} {importlib.metadata.version(package)}\n".encode())
    digest.update(Path(__file__).with_name("hf.py").read_bytes())
    return digest.hexdigest()


def spool_on_disk(run: RunConfig, plan: ShardPlan, target: Path) -> int:
    """Return what states on their way may take of the disk: nothing where memory has room for them."""
    if run.capture.backend == "transformers":
        return 0
    need = spool.most_bytes(_launch(run, plan, target).prefill_bytes)
    return 0 if spool.has_room(processes.MEMORY, need) else need


@contextlib.contextmanager
def capturing(context: StageContext, plan: ShardPlan, target: Path) -> Iterator[Capture]:
    """Start the engine of a plan, yield what captures samples, and stop it when the block ends."""
    import torch

    run = context.run
    if run.capture.backend == "transformers":
        refuse_other_states(read_target(target).model_class)
        from eagle3_core.engine.hf import TransformersCapture

        torch.set_num_threads(run.serving.threads)
        context.progress.phase("loading the target")
        yield TransformersCapture(
            target, plan.target_dtype, plan.aux_layers, resolve_device(run.serving.device)
        ).capture
        return
    from eagle3_core.engine.server import SglangServer

    # The rows of a sample are few; more threads would only take the engine's cores.
    torch.set_num_threads(1)
    with SglangServer.of_stage(_launch(run, plan, target), context) as server, server.client() as client:
        yield client.capture


def _launch(run: RunConfig, plan: ShardPlan, target: Path) -> LaunchPlan:
    return LaunchPlan.capture(
        target, plan.target_dtype, run.serving, plan.aux_layers, plan.max_sample_tokens, plan.prefill_tokens
    )
