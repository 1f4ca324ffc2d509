"""What this machine can run an engine on, found out in milliseconds and without importing torch."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from eagle3_core.errors import ConfigError, EngineArgsError

Device = Literal["cpu", "cuda"]

VERIFIES_GREEDILY = frozenset({"cpu", "xpu"})
"""SGLang's devices on which a verify pass of EAGLE takes the target's likeliest token at any temperature, without a
word (0.5.23: `_verify_uses_greedy` in `speculative/eagle_utils.py`)."""


def resolve_device(wanted: Literal["auto", "cpu", "cuda"]) -> Device:
    """Return where the engine runs: `auto` is the GPU where there is one and torch is built for it.

    Raises:
        EngineArgsError: `cuda` was asked for and is not there.
    """
    if wanted == "cpu":
        return "cpu"
    devices, built = _gpus(), torch_is_built_for_cuda()
    if devices and built:
        return "cuda"
    if wanted == "cuda":
        reason = "the installed torch is built for the CPU" if devices else "no visible NVIDIA GPU"
        raise EngineArgsError(f"serving.device is cuda, but {reason}; use auto or cpu, or install the GPU environment")
    return "cpu"


def check_sampling(temperatures: Sequence[float], device: str) -> None:
    """Refuse to measure sampling with speculation where SGLang does not sample.

    Raises:
        ConfigError: says so.
    """
    sampled = [temperature for temperature in temperatures if temperature > 0]
    if sampled and device in VERIFIES_GREEDILY:
        raise ConfigError(
            f"evaluation.temperatures: expected 0 alone on {device}, where SGLang verifies drafts greedily at any "
            f"temperature, found {', '.join(f'{one:g}' for one in sampled)}; leave them out, or set serving.device to "
            "cuda on a machine with a GPU"
        )


def _gpus() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return []
    return sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))


@cache
def torch_is_built_for_cuda() -> bool:
    """Return whether the installed torch has CUDA in it, read from its version file.

    Raises:
        EngineArgsError: no torch is installed here.
    """
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise EngineArgsError("torch is not installed in this environment; run `make setup`")
    text = (Path(found.origin).parent / "version.py").read_text(encoding="utf-8")
    return any(line.startswith("cuda") and not line.rstrip().endswith("None") for line in text.splitlines())
