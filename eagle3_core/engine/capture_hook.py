"""What runs inside SGLang's scheduler on a capture server: take both hidden states from one prefill, spool them.

A prefill reaches `LogitsProcessor.forward` with the post-norm last hidden state and the aux hidden states of every
prompt token, before SGLang prunes them to the last token. Requests are told apart by their `rid`, which our client
chooses and which says how many tokens the request has, so that a chunked prefill is complete when they are all there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3_core.engine import spool
from eagle3_core.engine.layers import boundaries, engine_layer_ids
from eagle3_core.engine.plugin import CAPTURE_DIR, CAPTURE_LAYERS
from eagle3_core.errors import CaptureMismatchError


@dataclass
class _Partial:
    """Rows of a request whose prefill came in chunks so far."""

    rows: int = 0
    input_ids: list[Any] = field(default_factory=list)
    aux: list[Any] = field(default_factory=list)
    last: list[Any] = field(default_factory=list)


_partials: dict[str, _Partial] = {}


def after_load_model(result: Any, runner: Any, *_args: Any, **_kwargs: Any) -> Any:
    """Tell the model which layers to capture, and check that it will.

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
    found = [
        tuple(module.layers_to_capture)
        for module in runner.model.modules()
        if getattr(module, "layers_to_capture", None)
    ]
    if found != [boundaries(layers)]:
        raise CaptureMismatchError(
            f"{name}: expected SGLang to record boundaries {boundaries(layers)} for the outputs of {layers}, found "
            f"{found}; its layer-id rule has changed, see engine/layers.py"
        )
    return result


def around_logits(original: Callable[..., Any], processor: Any, *args: Any, **kwargs: Any) -> Any:
    """Spool the states of a prefill, then go on as if nothing had happened."""
    names = ("input_ids", "hidden_states", "lm_head", "logits_metadata", "aux_hidden_states")
    given = dict(zip(names, args, strict=False)) | kwargs
    batch = given["logits_metadata"]
    mode = getattr(batch, "forward_mode", None)
    rids = getattr(batch, "rids", None)
    if mode is not None and rids and mode.is_extend() and not mode.is_target_verify():
        ours = [rid for rid in rids if spool.expected_tokens(rid) is not None]
        if ours:
            _spool_batch(given["input_ids"], given["hidden_states"], given.get("aux_hidden_states"), batch)
    return original(processor, *args, **kwargs)


def _spool_batch(input_ids: Any, last: Any, aux: Any, batch: Any) -> None:
    """Split one prefill batch into its requests by their extend lengths."""
    import torch

    if aux is None:
        raise CaptureMismatchError("expected aux hidden states with this prefill, found none; is a graph in use?")
    packed = aux if isinstance(aux, torch.Tensor) else torch.cat(list(aux), dim=-1)
    extends, prefixes = list(batch.extend_seq_lens_cpu), list(batch.extend_prefix_lens_cpu)
    total = sum(extends)
    rows = (input_ids.shape[0], packed.shape[0], last.shape[0])
    if len(batch.rids) != len(extends) or rows != (total, total, total):
        raise CaptureMismatchError(
            f"expected {total} rows for {len(batch.rids)} requests, found ids/aux/last {rows}, {len(extends)} lengths"
        )
    if not _writes():
        return
    ids, packed, last = input_ids.cpu(), packed.cpu(), last.cpu()
    start = 0
    for rid, extend, prefix in zip(batch.rids, extends, prefixes, strict=True):
        part = slice(start, start + extend)
        start += extend
        tokens = spool.expected_tokens(rid)
        if tokens is not None:
            _take(rid, tokens, int(prefix), ids[part], packed[part], last[part])


def _take(rid: str, tokens: int, prefix: int, ids: Any, aux: Any, last: Any) -> None:
    """Add rows to a request; write it once all of its tokens are there.

    A prefix other than the rows so far means that rows were served from a cache (or that the request was retracted and
    starts over, prefix 0): the rows so far are then worthless.
    """
    import torch

    partial = _partials.setdefault(rid, _Partial())
    if prefix == 0 and partial.rows:
        partial = _partials[rid] = _Partial()
    if prefix == partial.rows:
        # Copies: on a CPU these are views of buffers that the next batch overwrites.
        partial.rows += ids.shape[0]
        partial.input_ids.append(ids.clone())
        partial.aux.append(aux.clone())
        partial.last.append(last.clone())
    if partial.rows >= tokens or prefix + ids.shape[0] >= tokens:
        del _partials[rid]
        if partial.rows:
            spool.write(
                Path(os.environ[CAPTURE_DIR]),
                rid,
                {
                    "input_ids": torch.cat(partial.input_ids).to(torch.int32),
                    "aux_hidden_states": torch.cat(partial.aux),
                    "last_hidden_state": torch.cat(partial.last),
                },
            )


def _writes() -> bool:
    """Whether this process is the one of its tensor-parallel group that writes."""
    import torch

    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
