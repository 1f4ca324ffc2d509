"""What the writer is asked, and which of its answers are fit to learn from."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from eagle3_core.demo import prompts

SYSTEM = "You are a friendly helper. You answer briefly, in simple words and short sentences."
"""What the writer is told; the target never sees it, so it learns to answer this way unasked."""

EXAMPLES = Path(__file__).with_name("examples.json")
"""Answers of our own that show the writer the wanted length and tone: one of its domain stands before each prompt."""

SHARES = {
    "story": 0.36, "explain": 0.22, "describe": 0.12, "tips": 0.1, "howto": 0.08, "compare": 0.06, "talk": 0.03,
    "note": 0.02, "plan": 0.01,
}  # fmt: skip
"""Of every batch, the share of each domain."""

MIN_WORDS = 18
HELD_OUT = 50
"""One prompt in this many is kept from training, to measure the loss on."""

_PLAIN = str.maketrans(
    {
        "\u2019": "'",
        "\u2018": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2013": "-",
        "\u2014": "-",
        "\u2026": "...",
        "\u00a0": " ",
    }
)
_UNFIT = re.compile(r"[\[\]<>{}`#|\\]|https?:|SmolLM|Hugging|AI |language model|Alibaba|chatbot|\d{5}")
_SENTENCE = re.compile(r"[^.!?\n]+[.!?\n]")
_WORD = re.compile(r"[a-z0-9']+")


def chatml(prompt: str, example: tuple[str, str]) -> str:
    """The text that the writer completes: the system message, one example turn, the prompt."""
    turns = (("system", SYSTEM), ("user", example[0]), ("assistant", example[1]), ("user", prompt))
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"


def draw(seed: int) -> Iterator[tuple[str, str, str]]:
    """Endless (domain, prompt, text for the writer): the domain by its share, the rest evenly within the domain."""
    by_domain: dict[str, list[str]] = {}
    for domain, prompt in prompts.generate():
        by_domain.setdefault(domain, []).append(prompt)
    examples = json.loads(EXAMPLES.read_text(encoding="utf-8"))
    rng = random.Random(seed)
    domains, weights = list(SHARES), list(SHARES.values())
    while True:
        domain = rng.choices(domains, weights)[0]
        prompt, example = rng.choice(by_domain[domain]), rng.choice(examples[domain])
        yield domain, prompt, chatml(prompt, (example["prompt"], example["answer"]))


def held_out(prompt: str) -> bool:
    """Whether the prompt is kept from training (a function of its text alone)."""
    return int(hashlib.sha256(b"held-out " + prompt.encode()).hexdigest(), 16) % HELD_OUT == 0


def clean(answer: str, domain: str) -> str | None:
    """The answer in plain ASCII with tidy spaces, or None when it is unfit.

    Unfit are answers that are too short, do not end in a sentence, hold markup, placeholders or talk about the
    writer itself, or repeat themselves.
    """
    text = answer.translate(_PLAIN).replace("**", "").strip()
    text = re.sub(r"[ \t]+", " ", re.sub(r" *\n\s*\n *", "\n\n", text))
    words = _WORD.findall(text.lower())
    least = 6 if domain == "talk" else MIN_WORDS
    if len(words) < least or not text.isascii() or _UNFIT.search(text) or text[-1] not in ".!?\"'":
        return None
    sentences = [sentence.strip().lower() for sentence in _SENTENCE.findall(text) if len(sentence.split()) > 2]
    if len(set(sentences)) < len(sentences) or repetition(words) > 0.12:
        return None
    return text


def simple(chats: Sequence[tuple[str, str]], words: int) -> list[tuple[str, str]]:
    """The (prompt, answer) pairs whose answers use none but the `words` most common words of all answers."""
    said = [set(_WORD.findall(answer.lower())) for _, answer in chats]
    common = {word for word, _ in Counter(word for one in said for word in one).most_common(words)}
    return [chat for chat, one in zip(chats, said, strict=True) if one <= common]


def repetition(words: list[str], size: int = 4) -> float:
    """Share of runs of `size` words that have occurred before, 0 for texts shorter than two runs."""
    runs = [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
    return 1 - len(set(runs)) / len(runs) if len(runs) > 1 else 0.0


def pack(lengths: Iterable[int], row_tokens: int, open_rows: int = 32) -> list[list[int]]:
    """Group documents into rows of at most `row_tokens` tokens, first fit over the newest open rows.

    Args:
        lengths: Tokens of each document; longer ones than a row are left out.
        row_tokens: Capacity of a row.
        open_rows: How many rows are tried before a new one is begun.

    Returns:
        Per row the indices of its documents.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for index, length in enumerate(lengths):
        if length > row_tokens:
            continue
        fit = next((i for i, (_, free) in enumerate(room) if free >= length), None)
        if fit is None:
            rows.append([index])
            room = [*room[-open_rows + 1 :], (len(rows) - 1, row_tokens - length)]
        else:
            row, free = room[fit]
            rows[row].append(index)
            room[fit] = (row, free - length)
    return rows
