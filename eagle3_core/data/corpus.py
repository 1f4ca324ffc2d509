"""The prompt set and the corpus as records: what was asked, and what the target answered, in token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from eagle3_core.errors import UnknownSchemaError
from eagle3_core.storage import Artifact

PROMPTS = "prompts.jsonl"
CORPUS = "corpus.jsonl"

T = TypeVar("T")


@dataclass(frozen=True)
class AskedPrompt:
    """One line of a prompt set: `input_ids` end where the target begins its answer; `given_id` is the user's name."""

    id: str
    messages: list[dict[str, str]]
    later_turns: list[str]
    domain: str
    held_out: bool
    input_ids: list[int]
    given_id: str | None = None


@dataclass(frozen=True)
class Answer:
    """One line of a corpus: the sample's token ids are `input_ids + output_ids`, supervised on `output_ids`."""

    id: str
    domain: str
    held_out: bool
    input_ids: list[int]
    output_ids: list[int]
    finish_reason: str

    @property
    def length(self) -> int:
        """Return the tokens of the sample."""
        return len(self.input_ids) + len(self.output_ids)


def read_prompt_set(artifact: Artifact) -> list[AskedPrompt]:
    """Return the prompts of a prompt set, verified."""
    return list(_lines(artifact, PROMPTS, AskedPrompt))


def read_corpus(artifact: Artifact) -> Iterator[Answer]:
    """Return the answers of a corpus, or of a chunk of one, verified."""
    return _lines(artifact, CORPUS, Answer)


def write_corpus(path: Path, answers: list[Answer]) -> None:
    """Write the answers, one a line."""
    with path.open("w", encoding="utf-8") as file:
        for answer in answers:
            file.write(json.dumps(asdict(answer)) + "\n")


def _lines(artifact: Artifact, name: str, record: Callable[..., T]) -> Iterator[T]:
    """Yield the records of a file, verified.

    Raises:
        UnknownSchemaError: they have other fields.
    """
    with artifact.verified_path(name).open(encoding="utf-8") as file:
        for line in file:
            try:
                one = record(**json.loads(line))
            except TypeError as error:
                where = f"{artifact.store.root}/{artifact.ref.key}/{name}"
                raise UnknownSchemaError(f"{where}: written by another version ({error}); move it away") from None
            yield one
