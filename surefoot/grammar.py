"""What an output may be: a JSON schema, a regular expression, a choice, a context-free grammar; compiled by llguidance.

A grammar is made in the API process, tried out in a helper process of its (`api.grammar`), and compiled again by the
worker: from the same source, with the same version and the same limits, so what was accepted is what runs. The limits
are the engine's own counts of work, not seconds: whoever passes them once passes them always.

llguidance is imported where it is needed, since most requests have no grammar.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from surefoot.errors import InvalidRequest
from surefoot.types import Grammar, Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_SOURCE: Final = 256 << 10
"""Characters of a grammar's source."""

MAX_GBNF: Final = 16 << 10
"""Characters of a grammar in GBNF, which is rewritten while a caller waits."""

_LIMITS: Final[dict[str, Any]] = {
    "max_items_in_row": 5_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
}
"""A step's fuel is about 15 ms; a lexer's state is 1 to 2 KiB."""

_WHITE_SPACE: Final = r"[\x20\x0A\x0D\x09]{1,40}"
"""Between JSON's tokens; bounded, since models that may write white space for ever sometimes do."""


# ---- making ---------------------------------------------------------------------------------------------------------


def json_schema(schema: Mapping[str, Any] | str | bool, *, field: str) -> Grammar:
    """JSON that is valid by `schema`. Raises InvalidRequest for what is not an object."""
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{field} is not JSON.", param=field) from None
    if not isinstance(value, Mapping | bool):
        raise InvalidRequest(f"{field} must be a JSON schema, which is an object.", param=field)
    return _grammar({"json_schema": _spaced(value)}, field)


def json_object(*, field: str) -> Grammar:
    """Any JSON object."""
    return json_schema({"type": "object"}, field=field)


def regex(pattern: str, *, field: str) -> Grammar:
    """A text that the whole of `pattern` matches; the syntax is that of Rust's regex."""
    return lark(f"start: {_regex(pattern)}", field=field)


def choice(texts: Sequence[str], *, field: str) -> Grammar:
    """One of these texts. Raises InvalidRequest where there is none, or an empty one."""
    if not texts or not all(texts):
        raise InvalidRequest(f"{field} must hold texts to choose from, none of them empty.", param=field)
    return lark(f"start: {' | '.join(map(quoted, texts))}", field=field)


def cfg(text: str, *, field: str) -> Grammar:
    """A context-free grammar: Lark's notation, or GBNF (`root ::= …`)."""
    if "::=" not in text:
        return lark(text, field=field)
    if len(text) > MAX_GBNF:
        raise InvalidRequest(f"{field} has {len(text):,} characters; GBNF may have {MAX_GBNF:,}.", param=field)
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return lark(any_to_lark(text), field=field)
    except Exception as error:  # the converter raises its bare Exception for what it cannot read
        raise InvalidRequest(f"{field} is not a GBNF grammar: {brief(str(error))}", param=field) from None


def lark(text: str, *, field: str) -> Grammar:
    """A grammar in llguidance's dialect of Lark."""
    return _grammar({"lark_grammar": text}, field)


def around(answer: Grammar, text: str) -> Grammar:
    """A grammar in Lark that has `answer` as its `@answer`."""
    (one,) = json.loads(answer.source)["grammars"]
    whole = [{"name": "start", "lark_grammar": text}, {**one, "name": "answer"}]
    return Grammar(source=json.dumps({"grammars": whole}, ensure_ascii=False), field=answer.field)


def quoted(text: str) -> str:
    """A text as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False)


def embedded(schema: Mapping[str, Any] | bool) -> str:
    """JSON by `schema` as a term of Lark."""
    return f"%json {json.dumps(_spaced(schema), ensure_ascii=False)}"


def _spaced(schema: Mapping[str, Any] | bool) -> dict[str, Any]:
    whole = {"anyOf": [schema]} if isinstance(schema, bool) else dict(schema)
    return whole | {"x-guidance": {"whitespace_pattern": _WHITE_SPACE}}


def _regex(pattern: str) -> str:
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(pattern)}/"


def _grammar(one: dict[str, Any], field: str) -> Grammar:
    try:
        source = json.dumps({"grammars": [one]}, ensure_ascii=False)
        source.encode()
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field} cannot be used: {error}", param=field) from None
    if len(source) > MAX_SOURCE:
        raise InvalidRequest(f"{field} has {len(source):,} characters; a grammar may have {MAX_SOURCE:,}.", param=field)
    return Grammar(source=source, field=field)


# ---- compiling ------------------------------------------------------------------------------------------------------


class GrammarError(ValueError):
    """A grammar that cannot be compiled, and why."""


class Compiler:
    """Compiles grammars for one vocabulary. Making one takes half a second for 150,000 tokens."""

    def __init__(self, vocabulary: Vocabulary, eos: Sequence[int]) -> None:
        """`eos` are the tokens that end an output; without one nothing could."""
        from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

        self._limits = LLParserLimits(**_LIMITS, verbose_errors=False)
        words = _Words(vocabulary, eos)
        self._tokenizer: LLTokenizer = LLTokenizer(TokenizerWrapper(words), eos_token=list(words.eos))
        words.tokenizer = self._tokenizer
        self.words = self._tokenizer.vocab_size
        """Tokens that a mask has a bit for."""

    def compile(self, grammar: Grammar) -> LLMatcher:
        """A matcher at the start of an output. Raises GrammarError."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, grammar.source, log_level=0, limits=self._limits)
        first = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(brief(matcher.get_error()))
        if not any(first):
            raise GrammarError("nothing that could be said keeps to it")
        return matcher


def brief(error: str, limit: int = 300) -> str:
    """An error of the engine's as a caller may read it: one line, without the state behind it."""
    text = " ".join(error.split("<state>")[0].split("<backtrace>")[0].replace("<non-verbose/>", "").split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


class _Words:
    """A vocabulary as llguidance wants it. Text that a grammar forces is cut into the longest tokens that fit."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, eos: Sequence[int]) -> None:
        specials = set(vocabulary.specials)
        self.eos = [token for token in eos if token < len(vocabulary.tokens)] or [len(vocabulary.tokens)]
        self.eos_token_id = self.eos[0]
        # By convention a leading 0xFF, which no text contains, marks a token as special.
        self.tokens = [b"\xff" + text if token in specials else text for token, text in enumerate(vocabulary.tokens)]
        if self.eos == [len(vocabulary.tokens)]:
            self.tokens.append(b"\xff<end>")  # of a model that has none: it is never drawn
        self.special_token_ids = sorted(specials)
        self.tokenizer: LLTokenizer | None = None

    def __call__(self, text: bytes | str) -> list[int]:
        whole = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return [] if self.tokenizer is None else self.tokenizer.greedy_tokenize(whole)
