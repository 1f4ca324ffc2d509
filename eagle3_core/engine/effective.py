"""What the installed SGLang makes of a plan's arguments: asked before a launch, read back after it, compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3_core.engine.launch import LaunchPlan
from eagle3_core.errors import EngineArgsError


def validate(plans: Sequence[LaunchPlan], timeout_s: float = 180.0) -> list[dict[str, Any]]:
    """Resolve plans with the installed SGLang, in one subprocess, and return the resolved fields of each.

    Raises:
        EngineArgsError: SGLang would refuse or rewrite some; one line, with the likely name of a wrong flag.
    """
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        asked = json.dumps([plan.argv() for plan in plans])
        command = [sys.executable, "-m", "eagle3_core.engine.check_args", str(report), asked]
        try:
            done = subprocess.run(
                command, env=os.environ | plans[0].environment(1), capture_output=True, text=True, timeout=timeout_s,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise EngineArgsError(f"SGLang did not check its arguments within {timeout_s:.0f} s") from error
        if not report.exists():
            tail = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise EngineArgsError(f"SGLang could not be asked about its arguments (exit {done.returncode}): {tail}")
        answers: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))
    for plan, answer in zip(plans, answers, strict=True):
        if "error" in answer:
            raise EngineArgsError(f"to {plan.mode}: {answer['error']}")
        compare_effective(plan, answer["resolved"])
    return [answer["resolved"] for answer in answers]


def compare_effective(plan: LaunchPlan, effective: Mapping[str, Any]) -> None:
    """Check that the values SGLang runs with are those that were asked for.

    Raises:
        EngineArgsError: names every field that differs.
    """
    shape = plan.shape
    wanted: dict[str, Any] = {
        "dtype": plan.dtype,
        "device": plan.device,
        "speculative_algorithm": "EAGLE3" if shape else None,
        "speculative_num_steps": shape.num_steps if shape else None,
        "speculative_eagle_topk": shape.topk if shape else None,
        "speculative_num_draft_tokens": shape.num_draft_tokens if shape else None,
    }
    if plan.device == "cpu":
        wanted["attention_backend"] = "intel_amx"
    if plan.mode == "capture":
        wanted["disable_radix_cache"] = True
        # Which samples share a prefill must be ours to decide.
        wanted["chunked_prefill_size"] = wanted["max_prefill_tokens"] = plan.prefill_tokens
    wanted |= _asked_by_the_user(plan, effective)
    wrong = [
        f"{name}: asked {value!r}, got {effective.get(name)!r}"
        for name, value in wanted.items()
        if effective.get(name) != value
    ]
    if wrong:
        raise EngineArgsError("SGLang runs with other arguments than asked for: " + "; ".join(wrong))


def _asked_by_the_user(plan: LaunchPlan, effective: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `serving.engine_args` asks of plain fields that SGLang tells of; False took a flag of ours away."""
    named = {name.replace("-", "_"): value for name, value in plan.serving.flags.items()}
    plain = (str, int, float, bool)
    return {
        name: value for name, value in named.items()
        if value is not False and name in effective and isinstance(effective[name], plain)
    }  # fmt: skip
