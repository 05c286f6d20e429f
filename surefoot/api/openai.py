"""What a request may say: OpenAI's fields, vLLM's extras, and a 400 that names the field for everything else.

A documented field that does not work yet is declared with the values that ask for nothing (`Only`), so that clients
which send every default are served, and whoever asks for the feature is told. Fields that cannot change an answer
here (`user`, `metadata`, …) are accepted with any value of their type.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

import msgspec
from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    WithJsonSchema,
)

from surefoot.api.conversation import Message as Message
from surefoot.api.conversation import Messages, NamedTool, Tool
from surefoot.api.schema import Only as Only
from surefoot.api.schema import Schema as Schema
from surefoot.api.schema import Tokens as Tokens
from surefoot.api.schema import UnsupportedError
from surefoot.api.schema import listed as listed
from surefoot.api.structured import ResponseFormat, StructuredOutputs, grammar_of
from surefoot.errors import InvalidRequest
from surefoot.sampling import MAX_BAD_WORDS, MAX_LOGPROBS, MAX_N, shown
from surefoot.types import Grammar, SamplingParams

MAX_TOOLS: Final = 128
MAX_CHOICES: Final = 1024
"""Prompts × n in one request."""


class StreamOptions(Schema):
    include_usage: bool | None = None
    include_obfuscation: Only(False) = None  # type: ignore[valid-type]
    continuous_usage_stats: bool | None = None


class Sampling(Schema):
    """Fields that both generating endpoints share. Null means: not given."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    max_tokens: Tokens | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: Annotated[list[str] | None, BeforeValidator(listed, json_schema_input_type=str | list[str] | None)] = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Only requests of the same salt share cached prefixes."""
    timeout: Annotated[float, Field(gt=0, le=86_400)] | None = None
    """Seconds until the request's end, after which it is dropped and ends in a 408."""
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    bad_words: Annotated[list[str], Field(max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: list[int] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    prompt_logprobs: Only(why="only what is generated is scored") = None  # type: ignore[valid-type]
    use_beam_search: Only(False) = None  # type: ignore[valid-type]
    length_penalty: Only(1.0, 1) = None  # type: ignore[valid-type]
    spaces_between_special_tokens: Only(True) = None  # type: ignore[valid-type]
    truncate_prompt_tokens: Only() = None  # type: ignore[valid-type]

    _plain: ClassVar[tuple[str, ...]] = (
        "n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
        "presence_penalty", "frequency_penalty", "seed", "include_stop_str_in_output", "ignore_eos",
        "skip_special_tokens",
    )  # fmt: skip

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def check(self) -> None:
        """What no single field can tell. Raises InvalidRequest."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed with stream=true.", param="stream_options")
        if self.continuous_usage and not self.include_usage:
            raise InvalidRequest("continuous_usage_stats needs include_usage=true.", param="stream_options")

    def params(self, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
        """As given, with `defaults` for what is not: `surefoot.sampling.validate` has the last word on ranges. Unset
        `max_tokens` stays None."""
        given: dict[str, Any] = {"max_tokens": None, **(defaults or {})}
        given |= {name: value for name in self._plain if (value := getattr(self, name)) is not None}
        return SamplingParams(
            logprobs=self.alternatives(),
            logit_bias=tuple((self.logit_bias or {}).items()),  # type: ignore[arg-type]  # ids are strings in JSON
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            bad_words=tuple(self.bad_words or ()),
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            grammar=self.grammar(),
            **given,
        )

    def grammar(self) -> Grammar | None:
        """What the output has to be, if anything. Raises InvalidRequest."""
        return grammar_of(
            self.response_format,
            self.structured_outputs,
            guided={
                name: getattr(self, name) for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
            },
        )

    def alternatives(self) -> int | None:
        """Likeliest alternatives to report per token; None: no log-probabilities at all."""
        raise NotImplementedError


# ---- chat -----------------------------------------------------------------------------------------------------------


class ChatRequest(Sampling):
    messages: Messages
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    parallel_tool_calls: bool | None = None
    audio: Only() = None  # type: ignore[valid-type]
    function_call: Only("none") = None  # type: ignore[valid-type]
    functions: Only([]) = None  # type: ignore[valid-type]
    modalities: Only(["text"]) = None  # type: ignore[valid-type]
    moderation: Only() = None  # type: ignore[valid-type]
    prediction: Only() = None  # type: ignore[valid-type]
    prompt_cache_options: Only() = None  # type: ignore[valid-type]
    reasoning_effort: Only("none") = None  # type: ignore[valid-type]
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    verbosity: Only("medium") = None  # type: ignore[valid-type]
    web_search_options: Only() = None  # type: ignore[valid-type]

    def offered(self) -> list[dict[str, Any]]:
        """The tools that the model may call, as chat templates take them."""
        tools = [] if self.tool_choice == "none" else self.tools or []
        return [tool.model_dump(exclude_none=True) for tool in tools]

    def demanded(self) -> list[dict[str, Any]]:
        """Of these tools those that one has to be called of; none where the model may answer with text."""
        if self.tool_choice == "required":
            return self.offered()
        if not isinstance(self.tool_choice, NamedTool):
            return []
        return [tool for tool in self.offered() if tool["function"]["name"] == self.tool_choice.function.name]

    def check(self) -> None:
        super().check()
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise InvalidRequest("tools holds a function name twice.", param="tools")
        self._check_choice(names)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs=true.", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequest(
                f"max_completion_tokens={self.max_completion_tokens} and its older name max_tokens={self.max_tokens} "
                "disagree; give one of them.",
                param="max_completion_tokens",
            )

    def _check_choice(self, names: list[str]) -> None:
        choice = self.tool_choice
        if choice in (None, "none", "auto"):
            return
        if not names:
            raise InvalidRequest("tool_choice needs tools to choose from.", param="tool_choice")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise InvalidRequest(
                f"tool_choice names {shown(choice.function.name)}, which is not among tools.", param="tool_choice"
            )
        if self.grammar() is not None:
            raise InvalidRequest(
                "tool_choice makes the answer a call, which the structure asked for beside it cannot be; drop one.",
                param="tool_choice",
            )

    def params(self, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
        params = super().params(defaults)
        if self.max_completion_tokens is None:
            return params
        return msgspec.structs.replace(params, max_tokens=self.max_completion_tokens)

    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


# ---- completions ----------------------------------------------------------------------------------------------------

Prompt = str | list[int]
"""One prompt: text, or token ids."""


def _prompt(value: object) -> list[Prompt]:
    """A string, a list of strings, token ids, or a list of token-id lists → a list of prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists, not empty")
    kinds = set(map(type, value))
    if kinds == {int}:
        return [value]
    if kinds == {str} or (kinds == {list} and all(set(map(type, item)) == {int} for item in value)):
        return value
    raise ValueError("must hold strings, token ids or lists of token ids (of one kind, none of them empty)")


_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]
}


class CompletionRequest(Sampling):
    prompt: Annotated[Any, BeforeValidator(_prompt), WithJsonSchema(_PROMPT_SCHEMA)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    echo: bool | None = None
    suffix: Only("", why="texts are continued, gaps are not filled") = None  # type: ignore[valid-type]

    @property
    def prompts(self) -> list[Prompt]:
        prompts: list[Prompt] = self.prompt
        return prompts

    def check(self) -> None:
        super().check()
        n = self.n or 1
        most = n if self.best_of is None else self.best_of
        if most < n:
            raise InvalidRequest(f"best_of={most} must be at least n={n}.", param="best_of")
        if most > n and self.stream:
            raise InvalidRequest("best_of > n cannot be streamed: which are best is known at the end.", param="best_of")
        if self.echo and self.logprobs is not None:
            raise InvalidRequest("echo with logprobs is not supported: prompts are not scored.", param="echo")
        if len(self.prompts) * most > MAX_CHOICES:
            raise InvalidRequest(
                f"prompt holds {len(self.prompts):,} prompts of n={most} choices each; a request may ask for "
                f"{MAX_CHOICES:,} choices in all. Send several requests.",
                param="prompt",
            )

    def params(self, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
        """With best_of > n, for all of them; what they are ranked by is drawn along with them."""
        params = super().params(defaults)
        if self.best_of is None or self.best_of == params.n:
            return params
        return msgspec.structs.replace(params, n=self.best_of, logprobs=self.logprobs or 0)

    def alternatives(self) -> int | None:
        return self.logprobs


# ---- tokens ---------------------------------------------------------------------------------------------------------


class TokenizeRequest(Schema):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        """Raises InvalidRequest."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("Give either prompt or messages.", param="prompt")


class DetokenizeRequest(Schema):
    model: str | None = None
    tokens: list[int]


_S = TypeVar("_S", bound=Schema)


def parse(schema: type[_S], body: dict[str, Any]) -> _S:
    """A body as `schema`. Raises InvalidRequest whose `param` is the first field at fault."""
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        raise _explain(schema, error) from None


def renamed(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """An error about a chat, in the words of an endpoint that calls some fields of a chat by other `names`."""
    message = error.message
    for ours, theirs in names.items():
        message = re.sub(rf"\b{ours}\b", theirs, message)
    return InvalidRequest(message, param=names.get(error.param or "", error.param))


def _explain(schema: type[Schema], error: ValidationError) -> InvalidRequest:
    """The most telling of pydantic's findings, in a sentence: where a union fails, the member that came furthest."""
    found = error.errors(include_url=False)
    first = max((item for item in found if item["loc"][:1] == found[0]["loc"][:1]), key=lambda item: len(item["loc"]))
    path = _path(first["loc"])
    field = str(first["loc"][0])[:80] if first["loc"] else None
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(path, schema.model_fields, n=1)
        tip = f"Did you mean {near[0]}?" if near else "The fields are listed under /docs."
        return InvalidRequest(f"{path} is not a field that this server knows. {tip}", param=field)
    if first["type"] == "missing":
        return InvalidRequest(f"{path} is required.", param=field)
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, UnsupportedError):
        why = f" ({cause})" if str(cause) else ""
        return InvalidRequest(
            f"{path} is not supported yet{why}, got {shown(first['input'])}; leave it out.", param=field
        )
    rule = str(cause) if cause else first["msg"][0].lower() + first["msg"][1:]
    return InvalidRequest(f"{path}: {rule}, got {shown(first['input'])}.", param=field)


def _path(loc: tuple[int | str, ...]) -> str:
    """`("messages", 0, "role")` → `messages[0].role`; names of union members are left out."""
    path = ""
    for step in loc:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not path:
            path = shown(step)[1:-1]
        elif step.isidentifier() and step not in ("str", "int", "float"):
            path += f".{step}"
    return path
