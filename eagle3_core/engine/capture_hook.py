"""What runs inside SGLang's scheduler on a capture server: take both hidden states from one prefill, spool them.

A prefill reaches `LogitsProcessor.forward` with the post-norm last hidden state and the aux hidden states of every
prompt token, before SGLang prunes them to the last token. What it holds must be one group of our client's requests,
whole, in order and alone (a longer sample, which is a group of its own: its next chunk): then the same samples give the
same bits again.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from eagle3_core.engine import spool
from eagle3_core.engine.layers import boundaries, engine_layer_ids
from eagle3_core.engine.plugin import CAPTURE_DIR, CAPTURE_LAYERS
from eagle3_core.engine.spool import Member
from eagle3_core.errors import CaptureMismatchError

_AHEAD = 2
"""Prefills whose states may wait for the spool while the next are computed."""


def after_load_model(result: Any, runner: Any, *_args: Any, **_kwargs: Any) -> Any:
    """Tell the model which layers to capture, check that it will, and let it say when it begins a prefill.

    Raises:
        CaptureMismatchError: the model would capture other layers.
        EngineArgsError: the model class cannot capture them.
    """
    if getattr(runner, "is_draft_worker", False):
        return result
    layers = tuple(int(part) for part in os.environ[CAPTURE_LAYERS].split(","))
    name = type(runner.model).__name__
    num_layers = int(runner.model_config.hf_text_config.num_hidden_layers)
    runner.model.set_eagle3_layers_to_capture(list(engine_layer_ids(layers, name, num_layers)))
    capturing = [module for module in runner.model.modules() if getattr(module, "layers_to_capture", None)]
    found = [tuple(module.layers_to_capture) for module in capturing]
    if found != [boundaries(layers)]:
        raise CaptureMismatchError(
            f"{name}: expected SGLang to record boundaries {boundaries(layers)} for the outputs of {layers}, found "
            f"{found}; its layer-id rule has changed, see engine/layers.py"
        )
    capturing[0].register_forward_pre_hook(_before_forward, with_kwargs=True)
    return result


def _before_forward(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Say that the last prefill of a group has begun; the client sends the next group then, and none has to wait."""
    batch = next((value for value in (*args, *kwargs.values()) if hasattr(value, "forward_mode")), None)
    group = _group_of(batch)
    if group and _is_last(group, batch) and _writes():
        spool.admit(Path(os.environ[CAPTURE_DIR]), group[0].group)


def _is_last(group: Sequence[Member], batch: Any) -> bool:
    """Whether nothing of a group comes after this prefill; others could join a chunk that is not the last."""
    return int(batch.extend_prefix_lens_cpu[-1]) + int(batch.extend_seq_lens_cpu[-1]) >= group[-1].tokens


def around_logits(original: Callable[..., Any], processor: Any, *args: Any, **kwargs: Any) -> Any:
    """Spool the states of a prefill, then go on as if nothing had happened."""
    names = ("input_ids", "hidden_states", "lm_head", "logits_metadata", "aux_hidden_states")
    given = dict(zip(names, args, strict=False)) | kwargs
    batch = given["logits_metadata"]
    group = _group_of(batch)
    if group:
        spooler().take(group, batch, given["input_ids"], given["hidden_states"], given.get("aux_hidden_states"))
    return original(processor, *args, **kwargs)


def _group_of(batch: Any) -> list[Member]:
    """Return the requests of a prefill of ours, none for any other forward pass.

    Raises:
        CaptureMismatchError: it does not hold exactly one group.
    """
    mode, rids = getattr(batch, "forward_mode", None), getattr(batch, "rids", None)
    if mode is None or not rids or not mode.is_extend() or mode.is_target_verify():
        return []
    members = [Member.parse(rid) for rid in rids]
    ours = [member for member in members if member is not None]
    if not ours:
        return []
    first = ours[0]
    if len(ours) < len(members) or ours != [
        Member(first.group, at, len(ours), one.tokens) for at, one in enumerate(ours)
    ]:
        raise CaptureMismatchError(
            f"expected a prefill of one group of {first.count} samples, found {len(members)} requests, {len(ours)} of "
            "them samples; the engine split or mixed what was to share a prefill: give it more KV cache "
            "(serving.max_total_tokens) or lower capture.prefill_tokens"
        )
    return ours


class Spooler:
    """Collects the rows of one group after the other and writes them beside the engine's own work."""

    def __init__(self) -> None:
        self._group, self._rows, self._parts = "", 0, list[dict[str, Any]]()
        self._stream: Any = None
        self._waiting: queue.Queue[tuple[str, list[dict[str, Any]], Any]] = queue.Queue(maxsize=_AHEAD)
        threading.Thread(target=self._write_all, name="eagle3-spool", daemon=True).start()

    def take(self, group: Sequence[Member], batch: Any, input_ids: Any, last: Any, aux: Any) -> None:
        """Add a prefill to its group, and hand the group over once all of its tokens are there.

        Raises:
            CaptureMismatchError: rows are missing, were served from a cache, or have no aux states.
        """
        import torch

        if aux is None:
            raise CaptureMismatchError("expected aux hidden states with this prefill, found none; is a graph in use?")
        packed = aux if isinstance(aux, torch.Tensor) else torch.cat(list(aux), dim=-1)
        extends, prefixes = list(batch.extend_seq_lens_cpu), [int(prefix) for prefix in batch.extend_prefix_lens_cpu]
        rows, total = (input_ids.shape[0], packed.shape[0], last.shape[0]), sum(extends)
        if len(extends) != len(group) or rows != (total, total, total):
            raise CaptureMismatchError(
                f"expected {total} rows for {len(group)} requests, found ids/aux/last {rows}, {len(extends)} lengths"
            )
        # A sample that was retracted starts over: its rows so far are worthless.
        if group[0].group != self._group or prefixes[0] == 0:
            self._group, self._rows, self._parts = group[0].group, 0, []
        tokens = [member.tokens for member in group]
        if prefixes != [self._rows] + [0] * (len(group) - 1) or (len(group) > 1 and extends != tokens):
            raise CaptureMismatchError(
                f"expected {tokens} rows from row {self._rows} on, found {extends} from {prefixes} on; is the radix "
                "cache on, or were samples cut that share a prefill?"
            )
        if _writes():
            tensors = {"input_ids": input_ids.to(torch.int32), "aux_hidden_states": packed, "last_hidden_state": last}
            self._parts.append({name: self._to_host(tensor) for name, tensor in tensors.items()})
        self._rows += total
        if self._rows == sum(tokens):
            if self._parts:
                self._waiting.put((self._group, self._parts, self._stream and self._stream.record_event()))
            self._group, self._rows, self._parts = "", 0, []

    def _to_host(self, tensor: Any) -> Any:
        """Return a copy in host memory, from a GPU still under way; the engine uses its own buffers again."""
        import torch

        if not tensor.is_cuda:
            return tensor.clone()
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        return host

    def _write_all(self) -> None:
        directory = Path(os.environ[CAPTURE_DIR])
        while True:
            group, parts, copied = self._waiting.get()
            try:
                if copied is not None:
                    copied.synchronize()
                spool.write(directory, group, parts)
            except Exception as error:  # noqa: BLE001 - the client raises what it is told
                spool.fail(directory, group, " ".join(f"{type(error).__name__}: {error}".split()))


spooler = cache(Spooler)
"""The one of this process."""


def _writes() -> bool:
    """Whether this process is the one of its tensor-parallel group that writes."""
    import torch

    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
