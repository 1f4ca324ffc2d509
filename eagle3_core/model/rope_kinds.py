"""The kinds of RoPE that trainers and engines compute alike, and the settings of each. Light: no torch.

What is missing SGLang and transformers replace by numbers of their own, and what they do not know they skip, without a
word. NTK scaling (`dynamic`) is not among them: SGLang and vLLM scale always, trainers beyond the old context alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_SCALED = ("rope_theta", "factor")
_OLD = "original_max_position_embeddings"
NEEDED = {
    "default": ("rope_theta",),
    "linear": _SCALED,
    "llama3": (*_SCALED, _OLD, "low_freq_factor", "high_freq_factor"),
    "yarn": (*_SCALED, _OLD),
}
_SCALES = ("mscale", "mscale_all_dim")
_MORE = {
    "linear": (_OLD,),  # nobody reads it
    "yarn": ("beta_fast", "beta_slow", *_SCALES, "attention_factor", "truncate"),
}
_NUMBERS = frozenset({name for names in (*NEEDED.values(), *_MORE.values()) for name in names} | {"attn_factor"})


def check_rope(rope: Mapping[str, Any]) -> None:
    """Refuse settings that would be guessed, skipped or read as something else; a value of None is none.

    Raises:
        ValueError: names the kind or the setting.
    """
    kind, found = str(rope.get("rope_type")), {name for name, value in rope.items() if value is not None}
    if kind not in NEEDED:
        raise ValueError(f"RoPE type: expected {' or '.join(NEEDED)}, found {kind}; train with one of these")
    for name in NEEDED[kind]:
        if name not in found:
            raise ValueError(f"RoPE type {kind}: expected the key {name!r}, found none, which engines would guess; "
                             "add what it was trained with")  # fmt: skip
    if strange := sorted(found - {"rope_type", *NEEDED[kind], *_MORE.get(kind, ())}):
        raise ValueError(f"RoPE type {kind}: expected {', '.join((*NEEDED[kind], *_MORE.get(kind, ())))}, found "
                         f"{', '.join(strange)}, which is not read there; correct the type or the key")  # fmt: skip
    for name in sorted(found - {"rope_type"}):
        check_setting(name, rope[name])


def check_setting(name: str, value: object) -> None:
    """Refuse one value that is no number, or none that can be meant; of a name that is not known nothing is said.

    Raises:
        ValueError: names it.
    """
    if name == "truncate":
        fits, what = isinstance(value, bool), "true or false"
    elif name in _NUMBERS:
        number = type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
        fits = number and (value > 0 or (value == 0 and name in _SCALES))  # type: ignore[operator]
        what = "a number above 0"
    else:
        return
    if not fits:
        raise ValueError(f"{name} of RoPE: expected {what}, found {value!r}; correct it")
