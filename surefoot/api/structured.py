"""Structured output as requests ask for it: response_format, and vLLM's structured_outputs and older guided_*."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from surefoot import grammar
from surefoot.api.schema import Only, Schema
from surefoot.errors import InvalidRequest
from surefoot.types import Grammar


class JsonSchema(Schema):
    """`strict` or not, the schema is kept to."""

    name: str
    description: str | None = None
    wanted: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Schema):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _whole(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to type json_schema, which needs one")
        return self


class StructuredOutputs(Schema):
    """One of its fields."""

    wanted: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Only() = None  # type: ignore[valid-type]
    disable_fallback: Only(False) = None  # type: ignore[valid-type]
    disable_any_whitespace: Only(False) = None  # type: ignore[valid-type]
    disable_additional_properties: Only(False) = None  # type: ignore[valid-type]
    whitespace_pattern: Only() = None  # type: ignore[valid-type]


def grammar_of(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None, *, guided: Mapping[str, Any]
) -> Grammar | None:
    """What the output has to be. `guided` are the fields guided_json, …; of all fields one may ask for something.

    Raises InvalidRequest.
    """
    found = [each for each in (_of_format(response_format), *_of_structured(structured), *_of_guided(guided)) if each]
    if len(found) > 1:
        names = " and ".join(each.field for each in found)
        raise InvalidRequest(f"{names} both say what the output has to be; give one of them.", param=found[1].field)
    return found[0] if found else None


def _of_format(asked: ResponseFormat | None) -> Grammar | None:
    if asked is None or asked.type == "text":
        return None
    if asked.json_schema is None or asked.json_schema.wanted is None:
        return grammar.json_object(field="response_format")
    return grammar.json_schema(asked.json_schema.wanted, field="response_format")


def _of_structured(asked: StructuredOutputs | None) -> list[Grammar]:
    if asked is None:
        return []
    given = {"json": asked.wanted, "regex": asked.regex, "choice": asked.choice, "grammar": asked.grammar}
    found = _made(given, "structured_outputs")
    return [*found, grammar.json_object(field="structured_outputs")] if asked.json_object else found


def _of_guided(given: Mapping[str, Any]) -> list[Grammar]:
    return [made for name, value in given.items() for made in _made({name.removeprefix("guided_"): value}, name)]


def _made(given: Mapping[str, Any], field: str) -> list[Grammar]:
    makers = {"json": grammar.json_schema, "regex": grammar.regex, "choice": grammar.choice, "grammar": grammar.cfg}
    return [makers[name](value, field=field) for name, value in given.items() if value is not None]
