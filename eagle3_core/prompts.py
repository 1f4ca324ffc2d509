"""Read a prompt file: one JSON object a line, every problem named by its line number."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from eagle3_core.errors import InputError


@dataclass(frozen=True)
class Prompt:
    """One line of a prompt file: `messages` end with the user, who says `later_turns` one after each answer."""

    messages: tuple[Mapping[str, str], ...]
    later_turns: tuple[str, ...]
    domain: str


def read_prompts(path: Path, told_by: str = "data.prompts") -> Iterator[Prompt]:
    """Yield the prompts of a JSONL file; `told_by` is the key or flag by which the user named it.

    Raises:
        InputError: see `checked_prompts`.
    """
    if not path.is_file():
        raise InputError(f"prompts {path}: expected a JSONL file, found none; set {told_by}")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield parse_prompt(json.loads(line))
                except ValueError as error:
                    raise InputError(f"{path}:{number}: {error}; one JSON object a line") from None


def parse_prompt(values: object) -> Prompt:
    """Return the prompt in one JSON value: {prompt}, {messages} or {turns}, with an optional domain (or category).

    Raises:
        ValueError: says what was expected and found.
    """
    if not isinstance(values, dict):
        raise ValueError(f"expected an object, found {type(values).__name__}")
    kinds = [name for name in ("prompt", "messages", "turns") if name in values]
    if len(kinds) != 1:
        raise ValueError(f"expected exactly one of prompt, messages, turns, found {kinds or sorted(values)}")
    domain = str(values.get("domain") or values.get("category") or "general")
    if kinds == ["messages"]:
        return Prompt(_messages(values["messages"]), (), domain)
    turns = values["turns"] if kinds == ["turns"] else [values["prompt"]]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f"expected non-empty text in {kinds[0]}, found {turns!r:.60}")
    return Prompt(({"role": "user", "content": turns[0]},), tuple(turns[1:]), domain)


def _messages(values: object) -> tuple[Mapping[str, str], ...]:
    if not isinstance(values, list):
        raise ValueError(f"expected a list of messages, found {type(values).__name__}")
    for item in values:
        if not isinstance(item, dict) or not isinstance(item.get("content"), str) or not item.get("role"):
            raise ValueError(f"expected messages of role and text content, found {item!r:.60}")
    messages = [{"role": str(item["role"]), "content": str(item["content"])} for item in values]
    # The target writes its own answers: a recorded last answer is not a prompt.
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        raise ValueError("expected a last message of role user, found none")
    return tuple(messages)
