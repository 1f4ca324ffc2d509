"""A running server that somebody else started: what it says about itself, its chat template, its counters."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from pydantic import Field

from eagle3_core.config.base import Section
from eagle3_core.errors import EngineError, InputError
from eagle3_core.evaluate.bench.plan import BenchPrompt

KEPT = ("version", "model_path", "served_model_name", "dtype", "quantization", "kv_cache_dtype", "device", "tp_size",
        "dp_size", "attention_backend", "max_running_requests", "disable_radix_cache", "speculative_algorithm",
        "speculative_draft_model_path", "speculative_num_steps", "speculative_eagle_topk",
        "speculative_num_draft_tokens")  # fmt: skip
_TOKENIZED_AT_ONCE = 16


class ServerFacts(Section):
    """What the server says about itself."""

    url: str
    algorithm: str | None = Field(description="How it speculates; None: it does not, so it is a baseline.")
    shape: str | None = Field(description="Steps, topk and draft tokens.")
    arguments: dict[str, Any]

    @property
    def speculating(self) -> bool:
        """Return whether the server says that it speculates."""
        return self.algorithm is not None

    @property
    def title(self) -> str:
        """Return a few words for people."""
        return f"{self.algorithm} {self.shape}" if self.speculating else "no speculation"


class Endpoint:
    """A connection to one server; use it as an asynchronous context manager."""

    def __init__(self, url: str, connections: int, tokenizer: Path | None = None, timeout_s: float = 600.0) -> None:
        """Prepare; `tokenizer` is a directory for servers too old to apply their chat template by themselves."""
        self.url = url.rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise InputError(f"{url}: expected an address like http://localhost:30000")
        self._tokenizer = tokenizer
        limits = httpx.Limits(max_connections=connections + 2, max_keepalive_connections=connections + 2)
        timeout = httpx.Timeout(timeout_s, connect=10.0)
        self.http = httpx.AsyncClient(base_url=self.url, timeout=timeout, limits=limits)
        self.facts = ServerFacts(url=self.url, algorithm=None, shape=None, arguments={})

    async def __aenter__(self) -> Self:
        """Ask the server what it is.

        Raises:
            InputError: nothing there, or not SGLang.
        """
        try:
            self.facts = facts_of(self.url, await self._info())
        except BaseException:
            await self.http.aclose()
            raise
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self.http.aclose()

    async def _info(self) -> dict[str, Any]:
        found = ""
        for path in ("/server_info", "/get_server_info"):
            try:
                reply = await self.http.get(path, timeout=30.0)
                if reply.status_code == 200 and isinstance(info := reply.json(), dict) and "version" in info:
                    return info
                found = f"status {reply.status_code} of {path}"
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                found = f"{type(error).__name__} ({error})"
                break
            except ValueError:
                found = f"no JSON at {path}"
        raise InputError(f"{self.url}: expected a running SGLang server, found {found}; is the address right?")

    async def render(self, prompts: Sequence[BenchPrompt]) -> list[list[int]]:
        """Return the token ids of each prompt, through the server's own chat template.

        Raises:
            InputError: neither the server nor a tokenizer at hand can apply it.
        """
        if self._tokenizer is not None:
            return _rendered(self._tokenizer, prompts)
        gate = asyncio.Semaphore(_TOKENIZED_AT_ONCE)

        async def one(prompt: BenchPrompt) -> list[int] | str:
            async with gate:
                body = {"messages": [dict(message) for message in prompt.messages]}
                reply = await self.http.post("/tokenize", json=body)
            if reply.status_code != 200:
                return f"status {reply.status_code} of /tokenize: {' '.join(reply.text.split())[:160]}"
            return [int(token) for token in reply.json()["tokens"]]

        try:
            found = await asyncio.gather(*map(one, prompts))
        except (httpx.HTTPError, KeyError, TypeError, ValueError) as error:
            raise EngineError(f"{self.url}/tokenize: {error!r}; run again") from error
        refused = [answer for answer in found if isinstance(answer, str)]
        if not refused:
            return [answer for answer in found if not isinstance(answer, str)]
        local = Path(str(self.facts.arguments.get("model_path") or ""))
        if local.is_absolute() and (local / "config.json").is_file():
            return _rendered(local, prompts)
        raise InputError(
            f"{self.url}: expected it to apply its chat template, found {refused[0]}; give the target's directory "
            "with --tokenizer"
        )

    async def flush(self) -> None:
        """Empty the prefix cache; a server that others use right now refuses, which is theirs to decide."""
        try:
            await self.http.post("/flush_cache")
        except httpx.HTTPError as error:
            raise EngineError(f"{self.url}/flush_cache: {error!r}; is the server alive?") from error

    async def verify_calls(self) -> float | None:
        """Return the verify passes the server has counted since its start, where its metrics are on."""
        try:
            reply = await self.http.get("/metrics", follow_redirects=True)
        except httpx.HTTPError:
            return None
        lines = [line for line in reply.text.splitlines() if line.startswith("sglang:spec_verify_calls_total")]
        return sum(float(line.rpartition(" ")[2]) for line in lines) if lines and reply.status_code == 200 else None


def facts_of(url: str, info: dict[str, Any]) -> ServerFacts:
    """Return what matters of a server's own description."""
    algorithm = info.get("speculative_algorithm") or None
    sizes = [info.get(f"speculative_{name}") for name in ("num_steps", "eagle_topk", "num_draft_tokens")]
    return ServerFacts(
        url=url,
        algorithm=algorithm,
        shape="/".join("?" if size is None else str(size) for size in sizes) if algorithm else None,
        arguments={name: info[name] for name in KEPT if info.get(name) is not None},
    )


def _rendered(directory: Path, prompts: Sequence[BenchPrompt]) -> list[list[int]]:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        texts = [
            tokenizer.apply_chat_template(list(prompt.messages), tokenize=False, add_generation_prompt=True)
            for prompt in prompts
        ]
    except (OSError, ValueError) as error:
        raise InputError(f"{directory}: expected a tokenizer with a chat template, found {error}") from error
    return [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
