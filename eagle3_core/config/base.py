"""Section: closed, frozen, hashable by content."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError
from pydantic.fields import FieldInfo

from eagle3_core.config.wording import problems
from eagle3_core.errors import ConfigError

NOT_IDENTITY: dict[str, JsonValue] = {"identity": False}
"""`json_schema_extra` of a field that says where or how, not what: it does not enter content names."""


def canonical_sha256(value: object) -> str:
    """Return the sha256 of a JSON value written with sorted keys and no spaces."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


class Section(BaseModel):
    """One section of a run configuration: unknown keys are refused, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def identity(self) -> dict[str, Any]:
        """Return what enters content names: every field but those marked `NOT_IDENTITY`."""
        fields = type(self).model_fields
        named = {name for name, field in fields.items() if _is_identity(field)}
        return {name: value for name, value in self.model_dump(mode="json").items() if name in named}

    @classmethod
    def parse(cls, values: object, where: str) -> Self:
        """Validate `values`, turning every problem into one line.

        Raises:
            ConfigError: names each bad key, what was found, and the nearest known key.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(f"{where}: " + "; ".join(problems(cls, error.errors()))) from None


def _is_identity(field: FieldInfo) -> bool:
    extra = field.json_schema_extra
    return not (isinstance(extra, dict) and extra.get("identity") is False)
