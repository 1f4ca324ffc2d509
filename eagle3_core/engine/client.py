"""Typed calls to a running server: generate, capture, counters. Token ids in, the server's own token ids out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import httpx

from eagle3_core.engine import spool as spooled
from eagle3_core.engine.owed import Owed
from eagle3_core.engine.prefills import SentPrefill, prefills
from eagle3_core.engine.spool import AHEAD, CapturedSample
from eagle3_core.errors import CaptureMismatchError, EngineArgsError, EngineError, EngineUnreachableError

T = TypeVar("T")

_RETRIES = 3
_DEATH_NOTICE_S = 3.0


@dataclass(frozen=True)
class Sampling:
    """How a continuation is chosen; temperature 0 is greedy."""

    max_new_tokens: int
    temperature: float = 0.0
    ignore_eos: bool = False

    def parameters(self) -> dict[str, Any]:
        """Return SGLang's names."""
        names = ("max_new_tokens", "temperature", "ignore_eos")
        return {**{name: getattr(self, name) for name in names}, "skip_special_tokens": False}


@dataclass(frozen=True)
class Generation:
    """One answer, as the server counts it.

    Attributes:
        index: position of the prompt in what was asked for.
        output_ids: the server's own ids, EOS included where the model wrote it.
        spec_verify_ct: verify passes; None when the server does not speculate.
        spec_accept_histogram: [j] = verify passes that accepted exactly j draft tokens; None without speculation.
        latency_s: seconds from sending to the whole answer, waiting in the server's queue included.
    """

    index: int
    output_ids: list[int]
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    spec_verify_ct: int | None
    spec_accept_histogram: tuple[int, ...] | None
    latency_s: float


@dataclass(frozen=True)
class CaptureSettings:
    """What a capture server runs with: where its states go, and what decides which samples share a prefill."""

    spool: Path
    prefill_tokens: int
    page_size: int


@dataclass(frozen=True)
class ServerCounters:
    """What the server has counted since its start; None where it counted nothing."""

    avg_spec_accept_length: float | None
    last_gen_throughput: float | None


class EngineClient:
    """A thread-safe client of one server; close it, or use it as a context manager."""

    def __init__(
        self,
        url: str,
        *,
        capture: CaptureSettings | None = None,
        speculating: bool = False,
        cause_of_death: Callable[[], EngineError | None] = lambda: None,
        owed: Owed | None = None,
        timeout_s: float = 3600.0,
    ) -> None:
        """Connect to `url`; `cause_of_death` tells a dead server from a slow one, for which `owed` counts requests."""
        self._capture, self._speculating = capture, speculating
        self._queue, self._last_in_queue = threading.Lock(), SentPrefill("", threading.Event())
        self._last_in_queue.over.set()
        self._cause_of_death, self._owed = cause_of_death, owed or Owed()
        limits = httpx.Limits(max_connections=1024, max_keepalive_connections=64)
        self._http = httpx.Client(base_url=url, timeout=httpx.Timeout(timeout_s, connect=10.0), limits=limits)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, concurrency: int = 16
    ) -> Iterator[Generation]:
        """Yield one answer per prompt as they finish, in no particular order.

        Raises:
            EngineDiedError: the server died.
            EngineArgsError: the server refuses a prompt (too long, say).
            EngineUnreachableError: the server does not answer.
        """
        yield from self._each(len(prompts), concurrency, lambda index: self._generate(index, prompts[index], sampling))

    def generate_all(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, concurrency: int = 16
    ) -> list[Generation]:
        """Return one answer per prompt, in order; raises as `generate`."""
        return sorted(self.generate(prompts, sampling, concurrency=concurrency), key=lambda answer: answer.index)

    def _generate(self, index: int, input_ids: Sequence[int], sampling: Sampling) -> Generation:
        started = time.monotonic()
        request = {"input_ids": list(input_ids), "sampling_params": sampling.parameters()}
        reply = self._post("/generate", request, f"prompt {index} ({len(input_ids)} tokens)")
        meta = reply["meta_info"]
        reason = (meta.get("finish_reason") or {}).get("type")
        if reason not in ("stop", "length"):
            raise EngineError(
                f"prompt {index}: expected it to finish by stop or length, found {meta.get('finish_reason')}"
            )
        completion = int(meta["completion_tokens"])
        verify = meta.get("spec_verify_ct")
        if verify is None and self._speculating and completion <= 1:
            verify = 0  # The only token came from the prefill.
        histogram = meta.get("spec_correct_drafts_histogram") or meta.get("spec_accept_histogram")
        return Generation(
            index=index,
            output_ids=[int(token) for token in reply["output_ids"]],
            finish_reason=reason,
            prompt_tokens=int(meta["prompt_tokens"]),
            completion_tokens=completion,
            cached_tokens=int(meta.get("cached_tokens", 0)),
            spec_verify_ct=None if verify is None else int(verify),
            spec_accept_histogram=tuple(int(count) for count in histogram)
            if histogram
            else (() if verify == 0 else None),
            latency_s=time.monotonic() - started,
        )

    def capture(self, samples: Sequence[Sequence[int]]) -> Iterator[CapturedSample]:
        """Yield the hidden states of each sample, in order.

        Samples go to the engine in prefills that depend on their lengths alone (`engine/prefills.py`). One is sent when
        the engine has begun the one before it, of whatever caller: they cannot mix, and the engine does not wait.

        Raises:
            CaptureMismatchError: states are missing or belong to other tokens.
            EngineDiedError: the server died.
        """
        if self._capture is None:
            raise EngineArgsError("this server was not started by LaunchPlan.capture, it records no hidden states")
        how = self._capture
        groups = prefills([len(sample) for sample in samples], how.prefill_tokens, how.page_size)
        members = [spooled.new_group([len(samples[index]) for index in group]) for group in groups]
        replies: list[Future[None]] = []

        def send(number: int) -> None:
            ours = SentPrefill(members[number][0].group, threading.Event())
            with self._queue:
                before, self._last_in_queue = self._last_in_queue, ours
            try:
                spooled.wait_admitted(how.spool, before.group, before.over.is_set)
                if number and replies[number - 1].done():
                    # One that failed fails those behind it, or each would wait for a server that is silent.
                    replies[number - 1].result()
                group = groups[number]
                self._prefill(members[number], samples[group.start : group.stop], group.start)
            finally:
                ours.over.set()

        with ThreadPoolExecutor(AHEAD, thread_name_prefix="engine-capture") as pool:
            try:
                for number, group in enumerate(groups):
                    while len(replies) < min(number + AHEAD, len(groups)):
                        replies.append(pool.submit(send, len(replies)))
                    replies[number].result()
                    asked = samples[group.start : group.stop]
                    spool, name = how.spool, members[number][0].group
                    with self._owed.one():
                        states = spooled.take(spool, name, asked, group.start, self._raise_if_died)
                    yield from states
            finally:
                for reply in replies:
                    reply.cancel()

    def _prefill(self, members: Sequence[spooled.Member], samples: Sequence[Sequence[int]], first: int) -> None:
        request = {
            "input_ids": [list(sample) for sample in samples],
            "rid": [member.rid for member in members],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        }
        what = f"samples {first} to {first + len(samples) - 1} ({sum(map(len, samples))} tokens)"
        # Never sent twice: the first one may still be computed, and would meet itself.
        for reply in self._post("/generate", request, what, attempts=1):
            cached = int(reply["meta_info"].get("cached_tokens", 0))
            if cached:
                raise CaptureMismatchError(f"{what}: expected no cached tokens, found {cached}; is the radix cache on?")

    def server_info(self) -> dict[str, Any]:
        """Return SGLang's effective arguments and live state."""
        info: dict[str, Any] = self._get("/server_info")
        return info

    def counters(self) -> ServerCounters:
        """Return what the server counted since its start."""
        state = (self.server_info().get("internal_states") or [{}])[0]
        length, throughput = state.get("avg_spec_accept_length"), state.get("last_gen_throughput")
        return ServerCounters(
            None if length is None else float(length), None if throughput is None else float(throughput)
        )

    def flush_cache(self) -> None:
        """Forget all cached prefixes."""
        self._send(lambda: self._http.post("/flush_cache"), "flush_cache")

    def _each(self, count: int, concurrency: int, call: Callable[[int], T]) -> Iterator[T]:
        """Run `call` for 0..count-1 with a bounded number in flight; yield results as they finish."""
        with ThreadPoolExecutor(max_workers=max(1, concurrency), thread_name_prefix="engine-client") as pool:
            pending: set[Future[T]] = set()
            following = 0
            try:
                while following < count or pending:
                    while following < count and len(pending) < concurrency:
                        pending.add(pool.submit(call, following))
                        following += 1
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    for future in done:
                        yield future.result()
            finally:
                for future in pending:
                    future.cancel()

    def _post(self, path: str, body: dict[str, Any], what: str, attempts: int = _RETRIES) -> Any:
        return self._send(lambda: self._http.post(path, json=body), what, attempts).json()

    def _get(self, path: str) -> dict[str, Any]:
        reply: dict[str, Any] = self._send(lambda: self._http.get(path), path).json()
        return reply

    def _send(self, call: Callable[[], httpx.Response], what: str, attempts: int = _RETRIES) -> httpx.Response:
        for attempt in range(attempts):
            try:
                with self._owed.one():
                    reply = call()
            except httpx.TransportError as error:
                self._raise_if_dead()
                if attempt == attempts - 1:
                    raise EngineUnreachableError(
                        f"{what}: the server lives but {attempts} attempts failed: {error!r}; retry"
                    ) from error
                time.sleep(0.5 * (attempt + 1))
                continue
            if reply.status_code == 200:
                return reply
            message = " ".join(reply.text.split())[:400]
            if reply.status_code == 400:
                raise EngineArgsError(f"{what}: SGLang refuses it: {message}")
            self._raise_if_dead()
            raise EngineError(f"{what}: expected status 200, found {reply.status_code}: {message}")
        raise AssertionError("unreachable")

    def _raise_if_died(self) -> None:
        death = self._cause_of_death()
        if death is not None:
            raise death

    def _raise_if_dead(self) -> None:
        """Give a dying process a moment to be seen dead, then say so."""
        deadline = time.monotonic() + _DEATH_NOTICE_S
        while time.monotonic() < deadline:
            self._raise_if_died()
            with suppress(httpx.HTTPError):
                if self._http.get("/model_info", timeout=1.0).status_code == 200:
                    return
            time.sleep(0.1)
