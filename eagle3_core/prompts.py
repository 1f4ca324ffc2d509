"""Read a prompt file: one JSON object a line, every problem named by its line number."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from eagle3_core.errors import InputError

ROLES = ("system", "user", "assistant", "tool")

RULES = 2
"""Counts the changes of what a prompt may be: a file that passed before is read again."""


@dataclass(frozen=True)
class Prompt:
    """One line of a prompt file: `messages` end with the user, who says `later_turns` one after each answer.

    `given_id` is the file's own name of it, if it has one; ours is made of its content.
    """

    messages: tuple[Mapping[str, str], ...]
    later_turns: tuple[str, ...]
    domain: str
    given_id: str | None = None


def read_prompts(path: Path, told_by: str = "data.prompts") -> Iterator[Prompt]:
    """Yield the prompts of a JSONL file; `told_by` is the key or flag by which the user named it.

    Raises:
        InputError: see `checked_prompts`.
    """
    if not path.is_file():
        raise InputError(f"prompts {path}: expected a JSONL file, found none; set {told_by}")
    lines: dict[str, int] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    prompt = parse_prompt(json.loads(line))
                    if prompt.given_id is not None and lines.setdefault(prompt.given_id, number) != number:
                        raise ValueError(
                            f"expected an id of its own, found {prompt.given_id!r} of line {lines[prompt.given_id]}"
                        )
                except ValueError as error:
                    raise InputError(f"{path}:{number}: {error}; one JSON object a line") from None
                yield prompt


def parse_prompt(values: object) -> Prompt:
    """Return the prompt in one JSON value: {prompt}, {messages} or {turns}, with optional id and domain (or category).

    Raises:
        ValueError: says what was expected and found.
    """
    if not isinstance(values, dict):
        raise ValueError(f"expected an object, found {type(values).__name__}")
    kinds = [name for name in ("prompt", "messages", "turns") if name in values]
    if len(kinds) != 1:
        raise ValueError(f"expected exactly one of prompt, messages, turns, found {kinds or sorted(values)}")
    domain = str(values.get("domain") or values.get("category") or "general")
    given = values.get("id")
    if given is not None and (isinstance(given, bool) or not isinstance(given, str | int) or not str(given).strip()):
        raise ValueError(f"expected text or a whole number as id, found {given!r:.60}")
    name = None if given is None else str(given)
    if kinds == ["messages"]:
        return Prompt(_messages(values["messages"]), (), domain, name)
    turns = values["turns"] if kinds == ["turns"] else [values["prompt"]]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f"expected non-empty text in {kinds[0]}, found {turns!r:.60}")
    return Prompt(({"role": "user", "content": turns[0]},), tuple(turns[1:]), domain, name)


def _messages(values: object) -> tuple[Mapping[str, str], ...]:
    if not isinstance(values, list):
        raise ValueError(f"expected a list of messages, found {type(values).__name__}")
    for item in values:
        if not isinstance(item, dict) or not isinstance(item.get("content"), str) or not item.get("role"):
            raise ValueError(f"expected messages of role and text content, found {item!r:.60}")
        if item["role"] not in ROLES:
            raise ValueError(f"expected role {', '.join(ROLES[:-1])} or {ROLES[-1]}, found {item['role']!r:.60}")
    messages = [{"role": str(item["role"]), "content": str(item["content"])} for item in values]
    # The target writes its own answers: a recorded last answer is not a prompt.
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        raise ValueError("expected a last message of role user, found none")
    return tuple(messages)
