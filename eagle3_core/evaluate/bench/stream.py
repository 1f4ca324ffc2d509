"""One streamed request: tokens by the server's own count (a chunk may hold several), times by this clock."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
from pydantic import Field

from eagle3_core.config.sweep import Cell
from eagle3_core.engine.client import Sampling
from eagle3_core.errors import EngineError
from eagle3_core.evaluate.measurement import ServedAnswer

_PERIODS = 64
_LOOP_TOKENS, _LOOP_ROUNDS = 32, 4
_TOGETHER_S = 2e-4
"""No step of an engine is this short: chunks closer than that were sent together, and share the wait before them."""


class RequestFailedError(EngineError):
    """A request of the benchmark got no whole answer."""


class StreamedAnswer(ServedAnswer):
    """One answer with its times."""

    completion_tokens: int = Field(ge=0)
    concurrency: int
    max_new_tokens: int
    temperature: float
    cached_tokens: int = 0
    ttft_s: float = Field(description="Seconds to the first token, waiting in the server's queue included.")
    gaps: tuple[tuple[float, int], ...] = Field(
        (), exclude=True, description="Seconds since the chunk before, and tokens, of every chunk but the first."
    )
    empty: bool = Field(description="No visible character.")
    loop: bool = Field(description="Ends in a short piece repeated over and over.")

    @property
    def cell(self) -> Cell:
        """Return the point of the sweep."""
        return Cell(self.concurrency, self.max_new_tokens, self.temperature)


class _Reader:
    """Takes the events of one stream."""

    def __init__(self) -> None:
        self.started = self.last = time.perf_counter()
        self.ttft_s: float | None = None
        self.tokens = 0
        self.ids: list[int] = []
        self.visible = False
        self.gaps: list[tuple[float, int]] = []
        self.meta: Mapping[str, Any] = {}

    def take(self, event: Mapping[str, Any]) -> None:
        """Note one event."""
        now = time.perf_counter()
        if "error" in event:
            raise RequestFailedError(f"the server reports {str(event['error'])[:200]} after {self.tokens} tokens")
        self.meta = event["meta_info"]
        self.visible = self.visible or bool(str(event.get("text") or "").strip())
        total = int(self.meta["completion_tokens"])
        ids = event.get("output_ids") or []
        # Whole answers so far, or only what is new: the server has a switch for it.
        self.ids = list(ids) if len(ids) == total else [*self.ids, *ids]
        fresh, self.tokens = total - self.tokens, total
        if fresh <= 0:
            return
        if self.ttft_s is None:
            self.ttft_s = now - self.started
        elif now - self.last > _TOGETHER_S:
            self.gaps.append((now - self.last, fresh))
        elif self.gaps:
            waited, before = self.gaps[-1]
            self.gaps[-1] = (waited + now - self.last, before + fresh)
        self.last = now

    def answer(self, speculating: bool) -> dict[str, Any]:
        """Return the fields that the stream decides.

        Raises:
            RequestFailedError: the stream ended before the answer did.
        """
        reason = (self.meta.get("finish_reason") or {}).get("type")
        if reason not in ("stop", "length"):
            found = self.meta.get("finish_reason") or "the end of the stream"
            raise RequestFailedError(f"expected a stop or the length limit, found {found} after {self.tokens} tokens")
        latency = time.perf_counter() - self.started
        verify = self.meta.get("spec_verify_ct")
        if verify is None and speculating and self.tokens <= 1:
            verify = 0  # The only token came from the prefill.
        histogram = self.meta.get("spec_correct_drafts_histogram") or self.meta.get("spec_accept_histogram")
        return {
            "prompt_tokens": int(self.meta["prompt_tokens"]), "output_ids": tuple(self.ids),
            "completion_tokens": self.tokens, "finish_reason": reason, "verify_passes": verify,
            "accept_histogram": tuple(histogram) if histogram else (() if verify == 0 else None),
            "latency_s": latency, "cached_tokens": int(self.meta.get("cached_tokens") or 0),
            "ttft_s": latency if self.ttft_s is None else self.ttft_s, "gaps": tuple(self.gaps),
            "empty": not self.visible, "loop": looping(self.ids),
        }  # fmt: skip


async def ask(
    http: httpx.AsyncClient, input_ids: Sequence[int], sampling: Sampling, speculating: bool
) -> dict[str, Any]:
    """Return one answer, as the fields of `StreamedAnswer` that the server decides.

    Raises:
        RequestFailedError: refused, broken off, or not answered.
    """
    parameters = {**sampling.parameters(), "skip_special_tokens": True}
    body = {"input_ids": list(input_ids), "sampling_params": parameters, "stream": True}
    reader = _Reader()
    try:
        async with http.stream("POST", "/generate", json=body) as reply:
            if reply.status_code != 200:
                text = " ".join((await reply.aread()).decode(errors="replace").split())[:200]
                raise RequestFailedError(f"expected status 200, found {reply.status_code}: {text}")
            async for line in reply.aiter_lines():
                for event in _events(line):
                    reader.take(event)
    except httpx.HTTPError as error:
        raise RequestFailedError(f"{type(error).__name__} after {reader.tokens} tokens: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise RequestFailedError(f"not an answer of SGLang's /generate: {error!r}") from error
    return reader.answer(speculating)


def _events(line: str) -> Iterator[Mapping[str, Any]]:
    if line.startswith("data:") and (text := line[5:].strip()) != "[DONE]":
        yield json.loads(text)


def looping(ids: Sequence[int]) -> bool:
    """Return whether the answer ends in a piece of at most 64 tokens repeated four times, and at least 32 tokens."""
    for period in range(1, _PERIODS + 1):
        length = max(_LOOP_TOKENS, _LOOP_ROUNDS * period)
        if length > len(ids):
            continue
        tail = ids[-length:]
        if all(tail[at] == tail[at - period] for at in range(period, length)):
            return True
    return False
