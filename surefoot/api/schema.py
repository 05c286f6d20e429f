"""What all request bodies have in common: strict types, and fields that are known but not supported."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema


class UnsupportedError(ValueError):
    """Turned into the words a caller reads by `openai.parse`."""


def Only(*neutral: object, why: str = "") -> Any:  # noqa: N802 - reads as an annotation
    """The annotation of a field that is documented but not supported: `neutral` values, and null, ask for nothing."""
    allowed = (None, *neutral)

    def check(value: object) -> object:
        if any(type(value) is type(item) and value == item for item in allowed):
            return value
        raise UnsupportedError(why)

    schema = {"description": "Not supported yet; only values that ask for nothing are accepted.", "enum": list(allowed)}
    return Annotated[Any, BeforeValidator(check), WithJsonSchema(schema)]


class Schema(BaseModel):
    """Strict: no conversion between types, no unknown field."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def listed(value: object) -> object:
    """One string counts as a list of it."""
    return [value] if isinstance(value, str) else value


Tokens = Annotated[int, Field(ge=1, lt=1 << 63)]
"""A number of tokens to generate."""
