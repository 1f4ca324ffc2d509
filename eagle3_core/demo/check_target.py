"""How the tiny target answers greedily: does it end, does it loop, how sure is it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle3_core.demo import corpus

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """One greedy answer: its text, its tokens with the end, the probability of each, whether it ended by itself."""

    text: str
    tokens: int
    probabilities: list[float]
    ended: bool


def check(folder: Path, prompts: Sequence[str], device: str, max_tokens: int = 256, show: int = 12) -> dict[str, Any]:
    """Answer `prompts` greedily in float32 and log the first `show` answers.

    Returns:
        `ended`: share of answers that end by themselves; `median_tokens`: of those; `loops`: share of answers in which
        over 20 % of the four-word runs repeat; `top1`: mean probability of the token it says; `sure`: share of tokens
        with probability over 0.9.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    answers: list[Answer] = []
    for first in range(0, len(prompts), 256):
        answers += greedy(model, tokenizer, prompts[first : first + 256], max_tokens)
    for prompt, answer in list(zip(prompts, answers, strict=True))[:show]:
        _log.info("--- %s\n%s", prompt, answer.text)
    sure = [p for answer in answers for p in answer.probabilities]
    return {
        "prompts": len(answers),
        "ended": sum(answer.ended for answer in answers) / len(answers),
        "median_tokens": median([answer.tokens for answer in answers if answer.ended] or [0]),
        "loops": sum(corpus.repetition(answer.text.lower().split()) > 0.2 for answer in answers) / len(answers),
        "top1": sum(sure) / len(sure),
        "sure": sum(p > 0.9 for p in sure) / len(sure),
    }


def own_answers(
    folder: Path, prompts: Sequence[str], device: str, max_tokens: int = 224, batch: int = 2048
) -> list[tuple[str, str]]:
    """The (prompt, greedy answer) pairs that are fit to learn from: they end, do not repeat themselves, read tidily."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    fit: list[tuple[str, str]] = []
    for first in range(0, len(prompts), batch):
        asked = prompts[first : first + batch]
        for prompt, answer in zip(asked, greedy(model, tokenizer, asked, max_tokens), strict=True):
            if answer.ended and corpus.clean(answer.text, "talk") == answer.text:
                fit.append((prompt, answer.text))
    return fit


def greedy(model: Any, tokenizer: Any, prompts: Sequence[str], max_tokens: int) -> list[Answer]:
    """One batch of greedy answers, each at most `max_tokens` long."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True
    ).to(model.device)
    with torch.inference_mode():
        out = model.generate(
            **inputs, max_new_tokens=max_tokens, do_sample=False, return_dict_in_generate=True, output_scores=True
        )
    said = out.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    best = torch.stack([score.float().softmax(-1).amax(-1) for score in out.scores], dim=1).tolist()
    answers = []
    for ids, probabilities in zip(said, best, strict=True):
        ended = tokenizer.eos_token_id in ids
        length = ids.index(tokenizer.eos_token_id) + 1 if ended else len(ids)
        text = tokenizer.decode(ids[:length], skip_special_tokens=True)
        answers.append(Answer(text, length, probabilities[:length], ended))
    return answers
