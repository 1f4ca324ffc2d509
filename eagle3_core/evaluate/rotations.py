"""RoPE as SGLang computes it from a drafter's config: the reference's own reading, shared with no trainer.

Letters: S slots, d head width, r width of the rotated part with MLA.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from eagle3_core.errors import ParityError


def rotations(config: Mapping[str, Any], positions: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin [S, d/2] for positions [S], by `rope_parameters` where present, else by the old spelling.

    Raises:
        ParityError: SGLang knows no such kind, or would replace a number that is missing by one of its own.
    """
    rope = config.get("rope_parameters") or {**(config.get("rope_scaling") or {})}
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    plain = theta ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    try:
        old = float(rope.get("original_max_position_embeddings", config["max_position_embeddings"]))
        frequencies, length = _scaled(kind, rope, plain, theta, old)
    except KeyError as missing:
        raise ParityError(f"rope type {kind}: expected the key {missing}, found none; SGLang would guess it, so export "
                          "again from a target that has it") from None  # fmt: skip
    angles = positions[:, None].float() * frequencies
    return length * angles.cos(), length * angles.sin()


def latent_rotations(
    config: Mapping[str, Any], positions: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin [S, r/2] of a drafter with MLA for positions [S], `width` being r.

    Whatever is scaled is DeepSeek's YaRN to that class (DeepseekScalingRotaryEmbedding), so nothing else may be there.

    Raises:
        ParityError: another kind is, or a number is missing.
    """
    rope, kind = _latent_rope(config)
    if kind == "default":
        return rotations(config, positions, width)
    theta = float(rope["rope_theta"])
    plain = theta ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)
    settings = {**rope, "truncate": True}
    angles = positions[:, None].float() * _yarn(plain, settings, theta, float(rope["original_max_position_embeddings"]))
    whole = 1.0 if rope.get("mscale") is None else float(rope["mscale"])
    length = _grown(rope, whole) / _grown(rope, float(rope.get("mscale_all_dim") or 0)) * rope.get("attn_factor", 1)
    return length * angles.cos(), length * angles.sin()


def latent_scale(config: Mapping[str, Any]) -> float:
    """Return what scores are multiplied by beyond one over the root of the head width (compute_mla_mscale_scaling)."""
    rope, kind = _latent_rope(config)
    return 1.0 if kind == "default" else _grown(rope, float(rope.get("mscale_all_dim") or 0)) ** 2


def _latent_rope(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    rope = config["rope_parameters"]
    kind = rope["rope_type"]
    lacking = [name for name in ("factor", "original_max_position_embeddings") if kind == "yarn" and name not in rope]
    if kind not in ("default", "yarn") or lacking:
        raise ParityError(f"rope type {kind}: expected default, or yarn with factor and "
                          f"original_max_position_embeddings, found {dict(rope)}; SGLang's MLA drafter has no other "
                          "and would guess, so export again")  # fmt: skip
    return rope, kind


def _grown(rope: Mapping[str, Any], scale: float) -> float:
    return 1 + 0.1 * scale * max(0.0, math.log(float(rope["factor"])))


def _scaled(
    kind: str, rope: Mapping[str, Any], plain: torch.Tensor, theta: float, old: float
) -> tuple[torch.Tensor, float]:
    """Return the frequencies [d/2] of one kind, and what cos and sin are multiplied by; `old` is the old context."""
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return plain / float(rope["factor"]), 1.0
    if kind == "llama3":
        return _llama3(plain, rope, old), 1.0
    if kind == "yarn":
        return _yarn(plain, rope, theta, old), _yarn_length(rope)
    raise ParityError(f"rope type {kind!r}: expected default, linear, llama3 or yarn, the kinds a drafter is trained "
                      "with; train it again")  # fmt: skip


def _llama3(plain: torch.Tensor, rope: Mapping[str, Any], old: float) -> torch.Tensor:
    """Slow down frequencies below a wavelength bound, and blend between two bounds."""
    low, high, factor = (float(rope[name]) for name in ("low_freq_factor", "high_freq_factor", "factor"))
    wavelengths = 2 * math.pi / plain
    kept = ((old / wavelengths - low) / (high - low)).clamp(0, 1)
    return plain * (kept + (1 - kept) / factor)


def _yarn(plain: torch.Tensor, rope: Mapping[str, Any], theta: float, old: float) -> torch.Tensor:
    """Keep what turns often within the old context, slow down what turns seldom, and blend between the two."""
    half = plain.numel()

    def at(turns: float) -> float:
        """Return the index of the frequency that turns so often within the old context."""
        return half * math.log(old / (turns * 2 * math.pi)) / math.log(theta)

    first, last = at(float(rope.get("beta_fast") or 32)), at(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    slowed = ((torch.arange(half) - first) / (last - first if last != first else 0.001)).clamp(0, 1)
    kept = (1 - slowed) * float(rope.get("extrapolation_factor", 1))
    return plain * (kept + (1 - kept) / float(rope["factor"]))


def _yarn_length(rope: Mapping[str, Any]) -> float:
    """Return what YaRN lengthens queries and keys by; SGLang reads `attn_factor`, not transformers' word for it."""
    grown = 0.1 * max(0.0, math.log(float(rope["factor"])))
    scales = rope.get("mscale"), rope.get("mscale_all_dim")
    length = 1 + grown
    if scales[0] is not None and scales[1] is not None:
        length = (1 + grown * float(scales[0])) / (1 + grown * float(scales[1]))
    return length * float(rope.get("attn_factor", 1))
