"""Checked-in runs by name, a user's own YAML by path, and overrides on top of either."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from eagle3_core.config.run import RunConfig
from eagle3_core.errors import ConfigError


class _FloatLoader(yaml.SafeLoader):
    """Reads 2e-3 as a number; YAML 1.1 takes it for a string."""


_FloatLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def recipe_names() -> list[str]:
    """Return the names of the checked-in recipes."""
    folder = resources.files("eagle3_core.config") / "recipes"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_recipe(name_or_path: str, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Return the recipe with `overrides` ({"training.learning_rate": 3e-5}) applied.

    Raises:
        ConfigError: unknown recipe, unreadable YAML, unknown key or a value out of bounds.
    """
    values = _read(name_or_path)
    for path, value in (overrides or {}).items():
        _set(values, path, value)
    if values.get("champion") is not None:
        raise ConfigError(
            f"recipe {name_or_path}: champion: expected none, for a run takes it from its release as it begins; "
            "leave it out, and see `eagle3 releases show`"
        )
    return RunConfig.parse(values, f"recipe {name_or_path}")


def parse_override(text: str) -> tuple[str, Any]:
    """Read `training.learning_rate=3e-5`; the value is YAML.

    Raises:
        ConfigError: there is no `=`, or the value is no YAML.
    """
    path, found, value = text.partition("=")
    if not found or not path:
        raise ConfigError(f"override {text!r}: expected section.key=value")
    try:
        return path.strip(), yaml.load(value, Loader=_FloatLoader)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"override {text!r}: expected a YAML value: {getattr(error, 'problem', error)}; put text in quotes: "
            f"-s '{path.strip()}=\"...\"'"
        ) from None


def _read(name_or_path: str) -> dict[str, Any]:
    if name_or_path in recipe_names():
        text = (resources.files("eagle3_core.config") / "recipes" / f"{name_or_path}.yaml").read_text(encoding="utf-8")
    elif Path(name_or_path).is_file():
        try:
            text = Path(name_or_path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"recipe {name_or_path}: expected UTF-8 text, found {error.reason}") from None
    else:
        raise ConfigError(
            f"recipe {name_or_path!r}: neither a file nor one of {', '.join(recipe_names())}; name one or give a path"
        )
    try:
        values = yaml.load(text, Loader=_FloatLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"recipe {name_or_path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"recipe {name_or_path}: expected a mapping of sections, found {type(values).__name__}")
    return values


def _set(values: dict[str, Any], path: str, value: object) -> None:
    *parents, last = path.split(".")
    for name in parents:
        child = values.setdefault(name, {})
        if not isinstance(child, dict):
            raise ConfigError(f"override {path}: {name} is not a section")
        values = child
    values[last] = value
