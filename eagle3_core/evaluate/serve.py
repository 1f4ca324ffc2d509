"""Serve held-out prompts on one running server, as often as asked, and note what came back."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from eagle3_core.config.evaluation import EvaluationConfig
from eagle3_core.data.corpus import AskedPrompt
from eagle3_core.engine.client import Generation, Sampling
from eagle3_core.errors import InputError
from eagle3_core.evaluate.measurement import ServedAnswer

WARM_UP_PROMPTS = 2
WARM_UP_TOKENS = 16


class Client(Protocol):
    """What is needed of `engine.client.EngineClient`."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, concurrency: int = 16
    ) -> Iterable[Generation]:
        """Yield answers as they finish."""

    def flush_cache(self) -> None:
        """Forget cached prefixes."""


def held_out(prompts: Iterable[AskedPrompt], limit: int) -> list[AskedPrompt]:
    """Return up to `limit` held-out prompts, chosen and ordered by a hash of their id.

    Raises:
        InputError: none is held out.
    """
    found = [prompt for prompt in prompts if prompt.held_out]
    if not found:
        raise InputError("evaluate: expected held-out prompts, found none; raise data.held_out_fraction")
    return sorted(found, key=lambda prompt: hashlib.sha256(prompt.id.encode()).digest())[:limit]


def serve(
    client: Client, prompts: Sequence[AskedPrompt], evaluation: EvaluationConfig, on_answer: Callable[[int, int], None]
) -> tuple[list[ServedAnswer], list[float]]:
    """Return the answers of all passes and the seconds of each pass.

    Every pass starts with an empty prefix cache, after a warm-up that is not counted. `on_answer` gets the number of
    answers and of tokens so far.
    """
    ids = [prompt.input_ids for prompt in prompts]
    for _ in client.generate(ids[:WARM_UP_PROMPTS], Sampling(WARM_UP_TOKENS)):
        pass
    sampling = Sampling(max_new_tokens=evaluation.max_new_tokens, temperature=0.0)
    answers: list[ServedAnswer] = []
    wall_s: list[float] = []
    tokens = 0
    for repeat in range(evaluation.repeats):
        client.flush_cache()
        started = time.monotonic()
        generations = []
        for generation in client.generate(ids, sampling, concurrency=evaluation.concurrency):
            generations.append(generation)
            tokens += generation.completion_tokens
            on_answer(len(answers) + len(generations), tokens)
        wall_s.append(time.monotonic() - started)
        ordered = sorted(generations, key=lambda generation: generation.index)
        answers += [_answer(prompts[generation.index], generation, repeat) for generation in ordered]
    return answers, wall_s


def _answer(prompt: AskedPrompt, generation: Generation, repeat: int) -> ServedAnswer:
    return ServedAnswer(
        id=prompt.id, domain=prompt.domain or "other", repeat=repeat, prompt_tokens=generation.prompt_tokens,
        output_ids=tuple(generation.output_ids), completion_tokens=generation.completion_tokens,
        finish_reason=generation.finish_reason, verify_passes=generation.spec_verify_ct,
        accept_histogram=generation.spec_accept_histogram, latency_s=generation.latency_s,
    )  # fmt: skip
