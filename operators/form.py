"""The typed form of a run, derived from the pydantic models: one bound, one help text, one definition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow.sdk import Param

from eagle3_core.config import RunConfig
from eagle3_core.config.recipes import recipe_names
from eagle3_core.errors import ConfigError

FIELDS: dict[str, tuple[str, ...]] = {
    "Target": ("target.model", "target.dtype"),
    "Data": ("data.prompts", "data.window_days", "data.until", "data.max_prompts", "data.held_out_fraction",
             "data.max_new_tokens", "data.max_sample_tokens", "data.system_prompt"),
    "Drafter": ("drafter.draft_vocab_size", "drafter.intermediate_size"),
    "Training": ("training.start_from", "training.learning_rate", "training.warm_learning_rate", "training.epochs",
                 "training.batch_tokens", "training.row_tokens", "training.ttt_steps", "training.nproc",
                 "training.seed"),
    "Engine": ("capture.shard_tokens", "capture.dtype", "serving.device", "serving.tensor_parallel",
               "serving.max_running_requests"),
    "Evaluation": ("evaluation.max_prompts", "evaluation.max_new_tokens", "evaluation.concurrency",
                   "evaluation.temperatures"),
    "Gate": ("gate.min_acceptance_length", "gate.min_speedup", "gate.min_token_agreement", "gate.no_difference"),
}  # fmt: skip
"""What the form offers, by section. The rest of a configuration is a recipe's business, or goes in `overrides`."""

_NUMBER_AS_TEXT = r"^[-+]?[0-9]*\.?[0-9]+([eE][-+]?[0-9]+)?$"
_NUMBERS_AS_TEXT = r"^[-+0-9.eE, \[\]]+$"
"""Airflow shows it to whom it refuses; what gets through and is no number is told by the configuration in one line."""


def run_params(**defaults: str) -> dict[str, Param]:
    """Return the form: the recipe, then every offered key, empty for the recipe's value unless `defaults` has one."""
    params = {
        "recipe": Param(
            defaults.get("recipe", "demo"), type="string", minLength=1, examples=recipe_names(), title="Recipe",
            section="Run",
            description="A checked-in recipe or the path of a YAML file; what is filled in below overrides it.",
        ),
        "name": _param("name", "Run"),
        "overrides": Param(
            {}, type=["object", "null"], title="overrides", section="Run",
            description='Any other key, for example {"training.step_decay": 0.9}.',
        ),
    }  # fmt: skip
    for section, keys in FIELDS.items():
        params |= {key: _param(key, section, defaults.get(key)) for key in keys}
    return params


def overrides_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run's parameters set on top of the recipe; numbers may come as text, such as 3e-5, or `256, 1024`.

    Raises:
        ConfigError: a text is not the number it should be.
    """
    # Keys that the form does not offer come by API or CLI: the configuration takes or refuses each by name.
    given = {key: value for key, value in params.items() if key not in ("recipe", "overrides")}
    named = {key: _number(key, value) for key, value in given.items() if value not in (None, "")}
    return {**named, **(params.get("overrides") or {})}


def _number(key: str, value: Any) -> Any:
    offered = any(key in keys for keys in FIELDS.values())
    if not offered or not isinstance(value, str) or _schema_of(key)["type"] != "number":
        return value
    try:
        return float(value)
    except ValueError:
        raise ConfigError(f"{key}: expected a number such as 3e-5, found {value!r}") from None


def _schema_of(key: str) -> dict[str, Any]:
    section, _, name = key.rpartition(".")
    model: Any = RunConfig.model_fields[section].annotation if section else RunConfig
    found = model.model_json_schema()["properties"][name]
    # `int | None` is written as anyOf; every field of the form may be empty anyway.
    choices = [choice for choice in found.get("anyOf", []) if choice.get("type") != "null"]
    return {**(choices[0] if choices else {}), **found}


def _param(key: str, section: str, default: str | None = None) -> Param:
    schema = _schema_of(key)
    kind = schema["type"]
    # Of several numbers, each has to keep to them.
    bounded = schema.get("items", schema)
    bounds = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "pattern", "format")
    kept: dict[str, Any] = {name: bounded[name] for name in bounds if name in bounded}
    if "enum" in schema:
        kept["enum"] = [None, *schema["enum"]]
        types = ["null", kind]
    elif kind == "number":
        # A number field of Airflow's form cannot be typed 3e-5 into: text, checked by a pattern. A number by the API.
        kept |= {"pattern": _NUMBER_AS_TEXT, "examples": _examples(kept, schema.get("default"))}
        types = ["string", "number", "null"]
    elif kind == "array":
        # Airflow's form would ask for one a line, and its API refuse a single one: text again, and either by the API.
        first = ", ".join(f"{one:g}" for one in schema["default"])
        kept |= {"items": schema["items"], "pattern": _NUMBERS_AS_TEXT, "examples": [first]}
        types = ["string", schema["items"]["type"], "array", "null"]
    else:
        types = ["null", kind]
    return Param(default, type=types, title=key, section=section, description=_help({**schema, **kept}), **kept)


def _examples(bounds: Mapping[str, Any], default: float | None) -> list[str]:
    return [f"{default:g}"] if default is not None else [f"{bounds.get('minimum', 1):g}"]


def _help(schema: Mapping[str, Any]) -> str:
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = ", ".join(f"{sign} {schema[name]:,}" for name, sign in signs.items() if name in schema)
    return f"{schema['description']} Empty: the recipe's. {f'({limits})' if limits else ''}".strip()
