"""Merge the user's own SGLang flags into a plan's, without letting them contradict what has a place in the recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from eagle3_core.config.serving import EngineArg
from eagle3_core.errors import EngineArgsError

OWNED = {
    "--model-path": "target.model",
    "--model": "target.model",
    "--dtype": "target.dtype",
    "--device": "serving.device",
    "--tp-size": "serving.tensor_parallel",
    "--tensor-parallel-size": "serving.tensor_parallel",
    "--max-running-requests": "serving.max_running_requests",
    "--max-total-tokens": "serving.max_total_tokens",
    "--host": "the launcher",
    "--port": "the launcher",
    "--speculative-algorithm": "the evaluated shape",
    "--speculative-draft-model-path": "the evaluated shape",
    "--speculative-draft-model": "the evaluated shape",
    "--speculative-num-steps": "evaluation.shapes",
    "--speculative-eagle-topk": "evaluation.shapes",
    "--speculative-num-draft-tokens": "evaluation.shapes",
}
"""SGLang's flags, every alias of them, that have a place of their own."""
ELSEWHERE = {
    "--num-speculative-tokens": "--speculative-num-draft-tokens",
    "--speculative-num-tokens": "--speculative-num-draft-tokens",
    "--num-draft-tokens": "--speculative-num-draft-tokens",
    "--num-speculative-steps": "--speculative-num-steps",
    "--speculative-model": "--speculative-draft-model-path",
    "--draft-model": "--speculative-draft-model-path",
    "--speculative-config": "--speculative-algorithm",
    "--speculative-topk": "--speculative-eagle-topk",
    "--gpu-memory-utilization": "--mem-fraction-static",
    "--max-model-len": "--context-length",
    "--max-num-seqs": "--max-running-requests",
    "--max-num-batched-tokens": "--chunked-prefill-size",
    "--enforce-eager": "--disable-cuda-graph",
    "--no-enable-prefix-caching": "--disable-radix-cache",
    "--cuda-graph-max-bs": "--cuda-graph-max-bs-decode",
    "--tensor-parallel": "--tp-size",
}
"""What vLLM, older SGLang or memory call it -> what the installed SGLang calls it."""


def override(arguments: Sequence[str], engine_args: Mapping[str, EngineArg]) -> list[str]:
    """Return the arguments with the user's own put in place of ours; True is a bare flag, False removes one.

    Raises:
        EngineArgsError: a flag that the plan itself owns, or that SGLang calls otherwise.
    """
    merged = list(arguments)
    for name, value in engine_args.items():
        flag = "--" + name.lstrip("-").replace("_", "-")
        where = f"serving.engine_args.{name}"
        right = ELSEWHERE.get(flag, flag)
        if right in OWNED:
            called = "this flag" if right == flag else f"SGLang's name for it is {right}, which"
            raise EngineArgsError(f"{where}: {called} is set by {OWNED[right]}; set it there")
        if right != flag:
            raise EngineArgsError(f"{where}: SGLang has no flag {flag}, its name for it is {right}; say that")
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
