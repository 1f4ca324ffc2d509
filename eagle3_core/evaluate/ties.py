"""How close to the target's best the two tokens were where two answers part: the mark of a near-tie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from eagle3_core.evaluate.comparison import Difference

MAX_LOOKED_AT = 16
MAX_PARAMETERS = 1_000_000_000
"""A larger target is not loaded a second time, on a CPU, for a footnote."""


def with_gaps(
    found: Iterable[Difference], contexts: Mapping[str, Sequence[int]], target: Path, parameters: int, shape: str
) -> list[Difference]:
    """Return the differences, the first few with their logit gap; it stays unknown where one of the answers has ended.

    Args:
        found: The differences.
        contexts: By prompt id, the tokens of prompt and answer without speculation.
        target: The target's directory.
        parameters: How many it has; above a bound nothing is computed.
        shape: The draft shape that decides, all of whose differences are looked at; of the others a few.
    """
    listed = list(found)
    if not listed or parameters > MAX_PARAMETERS:
        return listed
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, local_files_only=True).eval()
    others = [index for index, one in enumerate(listed) if one.shape != shape]
    for index, difference in enumerate(listed):
        if index in others[MAX_LOOKED_AT:]:
            continue
        if difference.token is None or difference.baseline_token is None:
            continue
        tokens = contexts[difference.id]
        before = tokens[: len(tokens) - difference.tokens + difference.position]
        with torch.no_grad():
            logits = model(torch.tensor([list(before)])).logits[0, -1]
        gap = logits.max() - logits[[difference.token, difference.baseline_token]].min()
        listed[index] = difference.model_copy(update={"logit_gap": float(gap)})
    return listed
