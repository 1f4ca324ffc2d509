"""Read and write RoPE settings in both spellings: `rope_parameters`, and the older `rope_theta` with `rope_scaling`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from eagle3_core.errors import ExportError
from eagle3_core.model.rope_kinds import check_setting

_SPELLINGS = ("rope_parameters", "rope_scaling")


def read_rope(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the settings in the newer spelling; without `rope_theta` where none has it.

    Raises:
        ExportError: two spellings are there and differ, so that two engines would serve two drafters, or heads are
            rotated in part, which engines read from different places.
    """
    spellings = [(name, _plain(config.get(name) or {}, f"{where}: {name}")) for name in _SPELLINGS]
    if config.get("rope_theta") is not None:
        spellings.append(("rope_theta", {"rope_theta": config["rope_theta"]}))
    found: dict[str, Any] = {}
    for spelling, settings in spellings:
        for name, value in settings.items():
            _check(name, value, where)
            if found.setdefault(name, value) != value:
                raise ExportError(
                    f"{where}: {name}: expected one value in every spelling of RoPE, found {found[name]!r} and, in "
                    f"{spelling}, {value!r}; engines read either, so correct the wrong one"
                )
    found.setdefault("rope_type", "default")
    part = found.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    if part not in (None, 1):
        raise ExportError(
            f"{where}: partial_rotary_factor: expected 1, found {part}: transformers and SGLang read it from different "
            "places, so no drafter is written with it; train with whole heads"
        )
    if "attention_factor" in found:
        told, meant = found.pop("attn_factor", None), _attn_factor(found)
        if told is not None and not math.isclose(told, meant, rel_tol=1e-6):
            raise ExportError(
                f"{where}: attn_factor: expected {meant:g}, as attention_factor means it, found {told:g}; SGLang reads "
                "the one, transformers the other: correct the wrong one"
            )
    if "mrope_section" in found and found["rope_type"] in ("default", "mrope"):
        # Text positions are equal in all sections, which is plain RoPE.
        found = {"rope_type": "default", **{name: found[name] for name in found if name == "rope_theta"}}
    return found


def write_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in both spellings, and the factor of YaRN's attention in the words of both libraries."""
    rope = {**rope, "attn_factor": _attn_factor(rope)} if "attention_factor" in rope else dict(rope)
    scaled = dict(rope) if rope.get("rope_type", "default") != "default" else None
    return {"rope_theta": rope["rope_theta"], "rope_scaling": scaled, "rope_parameters": dict(rope)}


def _check(name: str, value: object, where: str) -> None:
    try:
        check_setting(name, value)
    except ValueError as error:
        raise ExportError(f"{where}: {error}") from None


def _attn_factor(rope: Mapping[str, Any]) -> float:
    """Return what SGLang must multiply its own factor by, to get transformers' `attention_factor`."""
    grown = 0.1 * math.log(max(1.0, float(rope.get("factor") or 1.0)))
    whole, dims = rope.get("mscale"), rope.get("mscale_all_dim")
    own = 1 + grown
    if whole is not None and dims is not None:
        own = (1 + grown * float(whole)) / (1 + grown * float(dims))
    return float(rope["attention_factor"]) / own


def _plain(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return what is set, with the kind under `rope_type` alone."""
    found = {name: setting for name, setting in value.items() if setting is not None}
    kind = found.pop("type", None)
    # A config that transformers saved again says `mrope` in the one word and `default` in the other.
    if kind not in (None, "mrope", found.get("rope_type", kind)):
        raise ExportError(
            f"{where}: expected one type of RoPE, found rope_type {found['rope_type']} and type {kind}; engines read "
            "either, so correct the wrong one"
        )
    return found if kind is None else {"rope_type": kind, **found}
