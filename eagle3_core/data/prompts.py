"""Normalise, identify, deduplicate and split prompts; pure functions of their content."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from eagle3_core.config.base import canonical_sha256
from eagle3_core.errors import InputError
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
    normal = replace(prompt, messages=tuple(messages), later_turns=turns)
    return NamedPrompt(_digest(messages, turns, loose=False)[:24], content, normal)


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


@dataclass(frozen=True)
class Split:
    """How many prompts of a choice are trained on and held out, and the least fraction that holds one out."""

    train: int
    held_out: int
    least: float

    def check(self, where: object, fraction: float) -> None:
        """Refuse a split with an empty side.

        Raises:
            InputError: says which fraction would do.
        """
        if self.train and self.held_out:
            return
        advice = (
            f"set data.held_out_fraction above {self.least:.4f} or add prompts"
            if not self.held_out
            else "lower data.held_out_fraction or add prompts"
        )
        raise InputError(
            f"{where}: expected at least one prompt to train on and one held out, found {self.train} and "
            f"{self.held_out} at data.held_out_fraction {fraction}; {advice}"
        )


def split(prompts: Sequence[NamedPrompt], fraction: float) -> Split:
    """Return the split of some prompts, at least one."""
    positions = [split_position(prompt) for prompt in prompts]
    held_out = sum(position < fraction for position in positions)
    return Split(len(positions) - held_out, held_out, min(positions))


def conversation(messages: Iterable[Mapping[str, str]], later_turns: Iterable[str]) -> str:
    """Return the sha256 of what is said but for system messages, case and blanks: whoever learnt it has seen it."""
    said = [dict(message) for message in messages if message["role"] != "system"]
    return _digest(said, tuple(later_turns), loose=True)


def _digest(messages: list[dict[str, str]], turns: tuple[str, ...], *, loose: bool) -> str:
    def key(text: str) -> str:
        return " ".join(text.casefold().split()) if loose else text

    return canonical_sha256(
        {"messages": [[message["role"], key(message["content"])] for message in messages], "turns": [*map(key, turns)]}
    )
