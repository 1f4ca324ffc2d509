"""Say in our words what pydantic found wrong: one clause a problem, what was expected and what was found."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

_EXPECTED = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "date_from_datetime_parsing": "a date like 2026-11-30",
    "date_parsing": "a date like 2026-11-30",
    "dict_type": "a mapping",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "at least {ge}",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "less_than": "a number below {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "multiple_of": "a multiple of {multiple_of}",
    "string_pattern_mismatch": "text like {pattern}",
    "string_type": "text",
    "too_long": "a list of at most {max_length}",
    "too_short": "a list of at least {min_length}",
    "tuple_type": "a list",
}
_SCALARS = ("bool", "int", "float", "str")
"""Last parts of a place where a value may be any of these."""


def problems(model: type[BaseModel], errors: Sequence[Any]) -> Iterator[str]:
    """Yield one clause a problem: the place, what was expected, what was found, the nearest valid key.

    Places of which the same is to be said share a clause.
    """
    places = [_place(error) for error in errors]
    said: set[tuple[str, ...]] = set()
    clauses: dict[str, list[str]] = {}
    for error, place in zip(errors, places, strict=True):
        # A list counts as too short where its elements are what is wrong; of alternatives one clause is enough.
        inner = any(other[: len(place)] == place and len(other) > len(place) for other in places)
        if place in said or (error["type"] == "too_short" and inner):
            continue
        said.add(place)
        path = ".".join(place)
        clauses.setdefault(_clause(model, error, place).removeprefix(f"{path}: "), []).append(path)
    for clause, paths in clauses.items():
        yield f"{', '.join(paths)}: {clause}".removeprefix(": ")


def _place(error: Any) -> tuple[str, ...]:
    parts = tuple(str(part) for part in error["loc"])
    return parts[:-1] if len(parts) > 2 and parts[-1] in _SCALARS else parts


def _clause(model: type[BaseModel], error: Any, place: tuple[str, ...]) -> str:
    path, kind, context = ".".join(place), error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return f"{path}: unknown key, {_hint(model, place)}"
    if kind == "value_error":
        return f"{path}: {context['error']}".removeprefix(": ")
    if kind == "missing":
        return f"{path}: expected a value, found none; add it"
    if kind in ("model_type", "model_attributes_type"):
        keys = ", ".join(_fields(model, place))
        return f"{path or 'all of it'}: expected a section with the keys {keys}, found {_found(error['input'])}"
    if len(place) < len(error["loc"]):
        return f"{path}: expected text, a number, true or false, found {_found(error['input'])}"
    # A new pydantic's finding still has a place and a value.
    expected = _EXPECTED.get(kind, "another value").format(**_plain(context))
    return f"{path}: expected {expected}, found {_found(error['input'])}"


def _plain(context: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)
        for name, value in context.items()
    }


def _found(value: object) -> str:
    return "nothing" if value is None else f"{value!r:.80}"


def _hint(model: type[BaseModel], place: tuple[str, ...]) -> str:
    known = _fields(model, place[:-1])
    elsewhere = {path.rpartition(".")[2]: path for path in _paths(model)}
    # A slip of the keys here, a key of another section, something like a key of this one.
    here = {name: name for name in known}
    for names, cutoff in ((here, 0.8), (elsewhere, 0.8), (here, 0.5)):
        if near := difflib.get_close_matches(place[-1], list(names), n=1, cutoff=cutoff):
            return f"did you mean '{names[near[0]]}'?"
    return f"known: {', '.join(known)}"


def _paths(model: type[BaseModel]) -> Iterator[str]:
    for name in model.model_fields:
        for inner in _fields(model, (name,)):
            yield f"{name}.{inner}"


def _fields(model: type[BaseModel], parents: Sequence[str]) -> list[str]:
    """Return the keys of the section at a place, none where it is no section."""
    for name in parents:
        if name.isdigit():
            continue
        field = model.model_fields.get(name)
        annotation = field.annotation if field else None
        candidates = [part for part in (annotation, *typing.get_args(annotation)) if _is_model(part)]
        if not candidates:
            return []
        model = candidates[0]
    return list(model.model_fields)


def _is_model(part: object) -> bool:
    return isinstance(part, type) and issubclass(part, BaseModel)
