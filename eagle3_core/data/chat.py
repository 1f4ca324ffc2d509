"""Render conversations to token ids with the target's own tokenizer and chat template."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3_core.errors import TargetError
from eagle3_core.identity import read_config

Messages = Sequence[Mapping[str, str]]

_PROBE, _PROBE_ANSWER = "Which colour has a ripe banana?", "A ripe banana is yellow."
_OPENED_THOUGHT = re.compile(r"\s*<[^<>]*think[^<>]*>\s*")


class Chat:
    """The tokenizer and chat template in a target's directory; neither runs code from it nor reaches the network."""

    def __init__(self, directory: Path) -> None:
        """Load the tokenizer.

        Raises:
            TargetError: it cannot be loaded or has no chat template.
        """
        # Set before the import, which reads it: a local directory never needs a hub.
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from transformers import AutoTokenizer

        self.directory = directory
        config = read_config(directory)
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError) as error:
            line = " ".join(str(error).split())
            raise TargetError(f"{directory}: the tokenizer cannot be loaded ({line:.200})") from None
        if not self._tokenizer.chat_template:
            raise TargetError(
                f"{directory}: expected a chat template (chat_template.jinja or in tokenizer_config.json), found none; "
                "copy the one the target was trained with"
            )
        self.stop_ids = sorted(_stop_ids(directory, config, self._tokenizer.eos_token_id))
        added = self._tokenizer.added_tokens_decoder.items()
        special = {int(number) for number, token in added if token.special}
        self.special_ids = sorted({*self._tokenizer.all_special_ids, *special, *self.stop_ids})

    def text(self, messages: Messages, *, generation_prompt: bool = True) -> str:
        """Return the rendered conversation, by default up to where the target begins its answer.

        Raises:
            TargetError: the template refuses these messages.
        """
        from jinja2.exceptions import TemplateError

        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages], tokenize=False, add_generation_prompt=generation_prompt
                )
            )
        except (TemplateError, TypeError, KeyError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise TargetError(
                f"{self.directory}: the chat template fails on messages of roles {roles} "
                f"({' '.join(str(error).split()):.200}); fix it, or change the prompts or data.system_prompt"
            ) from None

    def prompt_ids(self, messages: Messages) -> list[int]:
        """Return the token ids of the conversation up to where the target begins its answer."""
        return self.encode(self.text(messages))

    def encode(self, text: str) -> list[int]:
        """Return the ids of rendered text; the template has already written all special tokens."""
        return [int(token) for token in self._tokenizer(text, add_special_tokens=False)["input_ids"]]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of an answer, special tokens left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def check_template(directory: Path, system_prompt: str | None) -> int:
    """Render a probe and return how many of its tokens would be supervised.

    The loss mask is 1 on what follows the generation prompt. So the prompt must hold the question, must be the
    beginning of the conversation with its answer, and the answer must follow it. The text is compared, not the ids:
    in training the ids of an answer are the server's own.

    Raises:
        TargetError: names which of these fails.
    """
    chat = Chat(directory)
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    asked = [*system, {"role": "user", "content": _PROBE}]
    prompt = chat.text(asked)
    whole = chat.text([*asked, {"role": "assistant", "content": _PROBE_ANSWER}], generation_prompt=False)
    where = f"{directory}: chat template"
    if _PROBE not in prompt:
        raise TargetError(f"{where}: expected the user's message in the prompt, found {prompt!r:.80}; fix the template")
    shared = _common_start(prompt, whole)
    ours, answered = prompt[len(shared) :], whole[len(shared) :]
    # A template that opens a thought for the target (<think>) leaves it out when it renders a finished answer.
    if ours and not _OPENED_THOUGHT.fullmatch(ours):
        raise TargetError(
            f"{where}: expected the generation prompt to begin every answer, found {ours!r:.60} where an answered "
            f"conversation has {answered!r:.60}; the loss mask would be empty; fix the template"
        )
    answer = chat.encode(answered)
    if not answer or _PROBE_ANSWER not in answered:
        raise TargetError(
            f"{where}: expected the assistant's message after the generation prompt, found {answered!r:.60}; "
            "the loss mask would be empty; fix the template"
        )
    return len(answer)


def _common_start(one: str, other: str) -> str:
    length = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    return one[: min(len(one), len(other)) if length is None else length]


def _stop_ids(directory: Path, config: Mapping[str, Any], tokenizer_eos: int | None) -> set[int]:
    """Return every id that ends an answer, as SGLang does: of both configs and of the tokenizer."""
    found: set[int] = set() if tokenizer_eos is None else {tokenizer_eos}
    path = directory / "generation_config.json"
    generation = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for values in (generation, config, config.get("text_config") or {}):
        eos = values.get("eos_token_id")
        found.update([eos] if isinstance(eos, int) else eos or [])
    if not found:
        raise TargetError(f"{directory}: expected eos_token_id in generation_config.json or config.json, found none")
    return found
