"""What is trained and what is frozen, with shapes and counts: the answer to "is anything frozen?"."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from eagle3_core.model.architecture import DrafterArchitecture


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor: its name, shape, whether it is trained, and where its first values come from."""

    name: str
    shape: tuple[int, ...]
    trained: bool
    start: str

    @property
    def count(self) -> int:
        """Return the number of its values."""
        return math.prod(self.shape)


STARTS: Mapping[str, str] = {
    "lm_head.weight": "the target's rows of the draft vocabulary",
    "norm.weight": "the target's final norm",
    "fc.weight": "the highest aux layer passed on, the others small",
}


def parts(sizes: DrafterArchitecture, *, train_lm_head: bool) -> list[Part]:
    """Return every tensor that training holds, the target's two frozen matrices included."""
    D, V = sizes.hidden_size, sizes.vocab_size
    own = [
        Part(name, shape, train_lm_head or name != "lm_head.weight",
             STARTS.get(name, "ones" if len(shape) == 1 else "small, normal"))
        for name, shape in sizes.parameter_shapes().items()
    ]  # fmt: skip
    frozen = [Part("embed_tokens", (V, D), False, "the target's"), Part("target head", (V, D), False, "the target's")]
    return [*own, *frozen]


def explain(sizes: DrafterArchitecture, *, train_lm_head: bool) -> str:
    """Return the table people read."""
    rows = parts(sizes, train_lm_head=train_lm_head)
    lines = [f"{'tensor':42} {'shape':>16} {'values':>14}  {'':7} starts as"]
    for part in rows:
        shape = " x ".join(str(size) for size in part.shape)
        lines.append(
            f"{part.name:42} {shape:>16} {part.count:>14,}  {'trained' if part.trained else 'frozen':7} {part.start}"
        )
    trained, frozen = (sum(part.count for part in rows if part.trained is which) for which in (True, False))
    return "\n".join([*lines, f"{trained:,} trained, {frozen:,} frozen"])
