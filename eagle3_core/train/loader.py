"""Packed rows, read and sent to the device before anybody asks for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from eagle3_core.data.batches import Row, Samples
from eagle3_core.data.encoding import dequantise
from eagle3_core.model.unroll import Chains

AHEAD = 3
"""Rows in flight: one being trained on, one on its way to the device, one being read."""

READERS = 4
"""Samples read at once: from a bucket each waits for several answers."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One packed row on its device: N tokens of whole samples, concatenated; A aux layers, D target width."""

    samples: Row
    lengths: tuple[int, ...]
    loss_mask: torch.Tensor  # bool [N], on the CPU
    chains: Chains
    input_ids: torch.Tensor  # int64 [N]
    aux_hidden_states: torch.Tensor  # [N, A*D], as stored or in the precision of training
    last_hidden_state: torch.Tensor  # [N, D], after the target's final norm


def batches(features: Samples, rows: Iterable[Row], device: torch.device, dtype: torch.dtype) -> Iterator[Batch]:
    """Yield the batch of each row in order, a few of them ahead.

    Args:
        features: What the rows' numbers mean.
        rows: Samples packed together.
        device: Where batches go; a GPU's copies run beside its computing.
        dtype: Of hidden states on the device.
    """
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    waiting: deque[Future[tuple[Batch, torch.cuda.Event | None]]] = deque()
    with ThreadPoolExecutor(READERS, "reader") as readers, ThreadPoolExecutor(1, "loader") as loader:
        for row in rows:
            samples = [readers.submit(features.read, index) for index in row]
            waiting.append(loader.submit(_join, row, samples, device, dtype, stream))
            if len(waiting) == AHEAD:
                yield _arrived(waiting.popleft())
        while waiting:
            yield _arrived(waiting.popleft())


def _join(
    row: Row, reading: list[Future[Any]], device: torch.device, dtype: torch.dtype, stream: torch.cuda.Stream | None
) -> tuple[Batch, torch.cuda.Event | None]:
    samples = [sample.result() for sample in reading]
    lengths = tuple(len(sample.input_ids) for sample in samples)
    mask = torch.cat([sample.loss_mask for sample in samples])
    chains = Chains.build(mask, lengths)
    with nullcontext() if stream is None else torch.cuda.stream(stream):

        def send(parts: list[torch.Tensor]) -> torch.Tensor:
            shape = (sum(lengths), *parts[0].shape[1:])
            joined = torch.cat(parts, out=torch.empty(shape, dtype=parts[0].dtype, pin_memory=stream is not None))
            return joined.to(device, non_blocking=True)

        def send_states(states: list[torch.Tensor], scales: list[torch.Tensor | None]) -> torch.Tensor:
            """Send states as they are stored; those in 8 bits are turned back on the device."""
            factors = [one for one in scales if one is not None]
            return dequantise(send(states), send(factors)) if factors else send(states)

        batch = Batch(
            row,
            lengths,
            mask,
            chains.to(device),
            send([sample.input_ids for sample in samples]),
            send_states([s.aux_hidden_states for s in samples], [s.aux_scales for s in samples]).to(dtype),
            send_states([s.last_hidden_state for s in samples], [s.last_scales for s in samples]),
        )
        return batch, stream.record_event() if stream else None


def _arrived(future: Future[tuple[Batch, torch.cuda.Event | None]]) -> Batch:
    """Make the computing stream wait for the copies, and the allocator know who uses them."""
    batch, sent = future.result()
    if sent is not None:
        here = torch.cuda.current_stream()
        here.wait_event(sent)
        for tensor in _sent(batch):
            tensor.record_stream(here)
    return batch


def _sent(batch: Batch) -> Iterator[torch.Tensor]:
    """Yield every tensor the copying stream made."""
    chains = batch.chains
    documents = chains.documents
    yield from (batch.input_ids, batch.aux_hidden_states, batch.last_hidden_state)
    yield from (chains.rows, chains.depth, chains.positions)
    yield from (documents.bounds, documents.asking.places, documents.asking.bounds)
