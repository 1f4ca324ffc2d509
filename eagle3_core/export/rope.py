"""Read and write RoPE settings in both spellings: `rope_parameters`, and the older `rope_theta` with `rope_scaling`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle3_core.errors import ExportError


def read_rope(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the settings in the newer spelling; without `rope_theta` where none has it.

    Raises:
        ExportError: both spellings are there and differ, so that two engines would serve two drafters.
    """
    newer, older = _plain(config.get("rope_parameters")), _plain(config.get("rope_scaling"))
    spellings = [("rope_parameters", newer), ("rope_scaling", older)]
    if config.get("rope_theta") is not None:
        spellings.append(("rope_theta", {"rope_theta": config["rope_theta"]}))
    found: dict[str, Any] = {}
    for spelling, settings in spellings:
        for name, value in settings.items():
            if found.setdefault(name, value) != value:
                raise ExportError(
                    f"{where}: {name}: expected one value in every spelling of RoPE, found {found[name]!r} and, in "
                    f"{spelling}, {value!r}; engines read either, so correct the wrong one"
                )
    found.setdefault("rope_type", "default")
    if "mrope_section" in found:
        # Text positions are equal in all sections, which is plain RoPE.
        found = {"rope_type": "default", **{name: found[name] for name in found if name == "rope_theta"}}
    return found


def write_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in both spellings."""
    scaled = dict(rope) if rope.get("rope_type", "default") != "default" else None
    return {"rope_theta": rope["rope_theta"], "rope_scaling": scaled, "rope_parameters": dict(rope)}


def _plain(value: object) -> dict[str, Any]:
    """Return a copy with the kind under `rope_type` alone."""
    found = dict(value) if isinstance(value, dict) else {}
    kind = found.pop("type", None)
    if kind is not None:
        found.setdefault("rope_type", kind)
    return found
