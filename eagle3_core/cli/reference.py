"""`eagle3 reference`: the configuration reference of the README, written from the pydantic models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from eagle3_core.config import RunConfig, Section


def reference() -> None:
    """Print the configuration reference as Markdown."""
    print(markdown())


def markdown() -> str:
    """Return one table a section: key, type, default, bounds, meaning."""
    lines: list[str] = []
    for name, field in RunConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            title = " ".join((field.annotation.__doc__ or "").split())
            lines += [f"**`{name}`** {title}", "", "| key | default | bounds | meaning |", "|---|---|---|---|"]
            lines += list(_rows(field.annotation))
            lines.append("")
    return "\n".join(lines).rstrip()


def _rows(section: type[Section]) -> Iterator[str]:
    schema = section.model_json_schema()
    for name, field in section.model_fields.items():
        default = (
            "required"
            if field.is_required()
            else _shown(schema["properties"][name].get("default", field.get_default(call_default_factory=True)))
        )
        yield f"| `{name}` | {default} | {_bounds(schema['properties'][name])} | {field.description} |"


def _shown(value: Any) -> str:
    if value is None or value == {}:
        return ""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return ", ".join("/".join(str(number) for number in item.values()) for item in value)
    return f"`{value}`"


def _bounds(schema: dict[str, Any]) -> str:
    parts = [schema, *schema.get("anyOf", [])]
    names = {"minimum": ">= {}", "exclusiveMinimum": "> {}", "maximum": "<= {}", "exclusiveMaximum": "< {}"}
    found = [text.format(f"{part[key]:,}") for part in parts for key, text in names.items() if key in part]
    choices = [" \\| ".join(f"`{value}`" for value in part["enum"]) for part in parts if "enum" in part]
    return ", ".join(found + choices)
