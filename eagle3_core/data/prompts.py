"""Normalise, identify, deduplicate and split prompts; pure functions of their content."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from eagle3_core.config.base import canonical_sha256
from eagle3_core.prompts import Prompt


@dataclass(frozen=True)
class NamedPrompt:
    """A normalised prompt with its name.

    `id` is the sha256 of what is sent to the target (the system prompt included), 24 digits; `content` that of what the
    user gave, which decides selection and split: a new system prompt moves no prompt between train and held-out.
    """

    id: str
    content: str
    prompt: Prompt

    @property
    def messages(self) -> list[dict[str, str]]:
        """Return the conversation up to the first answer."""
        return [dict(message) for message in self.prompt.messages]


def normalise(text: str) -> str:
    r"""Return `text` in NFC, with \n line ends and no blanks around it; blanks inside may be code and stay."""
    return unicodedata.normalize("NFC", text).replace("\r\n", "\n").replace("\r", "\n").strip()


def named(prompt: Prompt, system_prompt: str | None) -> NamedPrompt:
    """Return the normalised prompt, with `system_prompt` put first if it has no system message of its own."""
    messages = [{"role": message["role"], "content": normalise(message["content"])} for message in prompt.messages]
    turns = tuple(normalise(turn) for turn in prompt.later_turns)
    content = _digest(messages, turns, loose=True)
    if system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": normalise(system_prompt)})
    return NamedPrompt(
        _digest(messages, turns, loose=False)[:24], content, Prompt(tuple(messages), turns, prompt.domain)
    )


def unique(prompts: Iterable[NamedPrompt]) -> Iterator[NamedPrompt]:
    """Yield the first of all prompts that differ in nothing but case and blanks."""
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.content not in seen:
            seen.add(prompt.content)
            yield prompt


def selection_rank(prompt: NamedPrompt) -> str:
    """Return what `max_prompts` sorts by: a hash, so that adding prompts keeps most of the choice."""
    return hashlib.sha256(f"select {prompt.content}".encode()).hexdigest()


def split_position(prompt: NamedPrompt) -> float:
    """Return a number in [0, 1): the prompt is held out if it is below the fraction. Depends on this prompt alone."""
    return int(hashlib.sha256(f"split {prompt.content}".encode()).hexdigest()[:13], 16) / 16**13


def _digest(messages: list[dict[str, str]], turns: tuple[str, ...], *, loose: bool) -> str:
    def key(text: str) -> str:
        return " ".join(text.casefold().split()) if loose else text

    return canonical_sha256(
        {"messages": [[message["role"], key(message["content"])] for message in messages], "turns": [*map(key, turns)]}
    )
