"""Merge the user's own SGLang flags into a plan's, without letting them contradict what has a place in the recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from eagle3_core.config.serving import EngineArg
from eagle3_core.errors import EngineArgsError

_OWNED = {
    "--model-path": "target.model",
    "--dtype": "target.dtype",
    "--device": "serving.device",
    "--tp-size": "serving.tensor_parallel",
    "--max-running-requests": "serving.max_running_requests",
    "--max-total-tokens": "serving.max_total_tokens",
    "--host": "the launcher",
    "--port": "the launcher",
    "--speculative-algorithm": "the evaluated shape",
    "--speculative-draft-model-path": "the evaluated shape",
    "--speculative-num-steps": "evaluation.shapes",
    "--speculative-eagle-topk": "evaluation.shapes",
    "--speculative-num-draft-tokens": "evaluation.shapes",
}


def override(arguments: Sequence[str], engine_args: Mapping[str, EngineArg]) -> list[str]:
    """Return the arguments with the user's own put in place of ours; True is a bare flag, False removes one.

    Raises:
        EngineArgsError: a flag that the plan itself owns.
    """
    merged = list(arguments)
    for name, value in engine_args.items():
        flag = "--" + name.lstrip("-").replace("_", "-")
        if flag in _OWNED:
            raise EngineArgsError(f"serving.engine_args.{name}: this flag is set by {_OWNED[flag]}; set it there")
        merged = _without(merged, flag)
        if value is True:
            merged.append(flag)
        elif value is not False:
            merged += [flag, str(value)]
    return merged


def _without(arguments: Sequence[str], flag: str) -> list[str]:
    kept: list[str] = []
    skipping = False
    for part in arguments:
        if part.startswith("--"):
            skipping = part == flag
        if not skipping:
            kept.append(part)
    return kept
