"""Sampling parameters, checked once: the server and the offline API refuse the same things with the same words.

    field                                range                     note
    n                                    1 … 128                   also for greedy decoding
    max_tokens                           1 …, or None              None: to the end of the context
    min_tokens                           0 … max_tokens
    temperature                          0 … 100                   below 1e-5: greedy
    top_p                                (0, 1]
    top_k                                0 …, or -1                0 and -1 mean off
    min_p                                0 … 1
    repetition_penalty                   0.01 … 100
    presence_penalty, frequency_penalty  -2 … 2
    logit_bias                           -100 … 100 per token id   at most 1,024 ids
    seed                                 any signed 64-bit         None and -1: drawn here
    stop                                 at most 16 strings        1 … 1,000 characters each
    stop_token_ids                       at most 128 ids
    logprobs                             0 … 20, or None           alternatives per token
    allowed_token_ids                    at least one id, or None
    bad_words                            at most 256 strings       1 … 100 characters each
    bad_token_ids                        at most 1,024 sequences   of token ids, not empty

The upper ends that vLLM does not have (temperature, repetition_penalty) keep float32 arithmetic on logits finite.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from surefoot.errors import InvalidRequest
from surefoot.types import Grammar, SamplingParams

MAX_N: Final = 128
MAX_LOGPROBS: Final = 20
MAX_LOGIT_BIAS: Final = 1024
MAX_STOP: Final = 16
MAX_STOP_LENGTH: Final = 1000
MAX_STOP_TOKEN_IDS: Final = 128
MAX_BAD_WORDS: Final = 256
MAX_BAD_WORD_LENGTH: Final = 100

_INT64 = 1 << 63
_SMALLEST_TOP_P = 1e-6
"""Below it float32 sums cannot tell: the likeliest token alone is kept, which is what so small a value asks for."""

_FLOAT_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
_INT_RANGES: dict[str, tuple[int, int]] = {
    "n": (1, MAX_N),
    "min_tokens": (0, _INT64 - 1),
    "top_k": (-1, _INT64 - 1),
}
_OPTIONAL_INT_RANGES: dict[str, tuple[int, int]] = {
    "max_tokens": (1, _INT64 - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "seed": (-_INT64, _INT64 - 1),
}
_FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")


def validate(params: SamplingParams, *, token_count: int) -> SamplingParams:
    """Return `params` in canonical form, or raise InvalidRequest whose `param` is the field at fault.

    Canonical: numbers have their declared type, `top_k` -1 is 0, `stop` and `stop_token_ids` are tuples (a single
    string counts as one), `logit_bias` is a tuple of pairs (a mapping is accepted), and `seed` is set, in 0 … 2^64-1.
    `token_count` is the number of token ids that mean something; ids from there on are padding rows.
    """
    fields: dict[str, Any] = {}
    for name, (low, high) in _FLOAT_RANGES.items():
        fields[name] = _number(name, getattr(params, name), low, high)
    for name, (least, most) in _INT_RANGES.items():
        fields[name] = _integer(name, getattr(params, name), least, most)
    for name, (least, most) in _OPTIONAL_INT_RANGES.items():
        value = getattr(params, name)
        fields[name] = None if value is None else _integer(name, value, least, most)
    for name in _FLAGS:
        fields[name] = _flag(name, getattr(params, name))
    fields["top_p"] = _top_p(params.top_p)
    fields["top_k"] = max(0, fields["top_k"])
    fields["seed"] = _seed(fields["seed"])
    fields["stop"] = _stop(params.stop)
    fields["stop_token_ids"] = _stop_token_ids(params.stop_token_ids, token_count)
    fields["allowed_token_ids"] = _allowed_token_ids(params.allowed_token_ids, token_count)
    fields["bad_words"] = _bad_words(params.bad_words)
    fields["bad_token_ids"] = _bad_token_ids(params.bad_token_ids, token_count)
    if params.grammar is not None and not isinstance(params.grammar, Grammar):
        raise _refuse("grammar", "made by surefoot.grammar", params.grammar)
    fields["logit_bias"] = _logit_bias(params.logit_bias, token_count)
    _check_min_tokens(fields["min_tokens"], fields["max_tokens"])
    return msgspec.structs.replace(params, **fields)


def draw_seed() -> int:
    """A seed in 0 … 2^64-1 for a request that names none."""
    return secrets.randbits(64)


def shown(value: object, limit: int = 80) -> str:
    """A value as an error message may quote it: short, printable, encodable."""
    text = ascii(value) if not isinstance(value, int) or isinstance(value, bool) else _shown_int(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _shown_int(value: int) -> str:
    """Decimal digits cost quadratic time and are refused by `str` beyond 4,300 of them."""
    return str(value) if value.bit_length() <= 256 else f"an integer of {value.bit_length()} bits"


def _refuse(name: str, rule: str, value: object) -> InvalidRequest:
    return InvalidRequest(f"{name} must be {rule}, got {shown(value)}.", param=name)


def _number(name: str, value: object, low: float, high: float) -> float:
    rule = f"a number in [{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise _refuse(name, rule, value)
    return float(value)


def _integer(name: str, value: object, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        bounds = f"of at least {least}" if most == _INT64 - 1 and least > -_INT64 else f"in [{least}, {most}]"
        raise _refuse(name, f"an integer {bounds}", value)
    return value


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _refuse(name, "true or false", value)
    return value


def _top_p(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value <= 1.0:
        raise _refuse("top_p", "a number in (0, 1]", value)
    return max(float(value), _SMALLEST_TOP_P)


def _seed(seed: int | None) -> int:
    if seed is None or seed == -1:
        return draw_seed()
    return seed % (1 << 64)


def _check_min_tokens(min_tokens: int, max_tokens: int | None) -> None:
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens must be at most max_tokens={max_tokens}, got {min_tokens}.", param="min_tokens"
        )


def _items(name: str, value: object, limit: int, what: str) -> tuple[object, ...]:
    if not isinstance(value, list | tuple):
        raise _refuse(name, f"a list of {what}", value)
    if len(value) > limit:
        raise InvalidRequest(f"{name} may hold at most {limit:,} {what}, got {len(value):,}.", param=name)
    return tuple(value)


def _stop(value: object) -> tuple[str, ...]:
    items = _items("stop", (value,) if isinstance(value, str) else () if value is None else value, MAX_STOP, "strings")
    return tuple(map(_stop_string, items))


def _stop_string(item: object) -> str:
    if not isinstance(item, str):
        raise _refuse("stop", "a string or a list of strings", item)
    if not item:
        raise InvalidRequest("stop may not hold an empty string: it would end every text at once.", param="stop")
    if len(item) > MAX_STOP_LENGTH:
        raise InvalidRequest(
            f"stop strings may have at most {MAX_STOP_LENGTH:,} characters, got {len(item):,}.", param="stop"
        )
    return item


def check_token_ids(name: str, ids: Sequence[Any], token_count: int) -> None:
    """Raise InvalidRequest naming `name` unless every item is an int in 0 … token_count-1."""
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < token_count:
        return  # a prompt of 100,000 ids, ten times as fast as one by one
    for item in ids:
        if isinstance(item, bool) or not isinstance(item, int):
            raise _refuse(name, "made of integer token ids", item)
        if not 0 <= item < token_count:
            raise InvalidRequest(
                f"{name} holds token id {shown(item)}, but this model's vocabulary has ids 0 to {token_count - 1}.",
                param=name,
            )


def _stop_token_ids(value: object, token_count: int) -> tuple[int, ...]:
    items = _items("stop_token_ids", () if value is None else value, MAX_STOP_TOKEN_IDS, "token ids")
    check_token_ids("stop_token_ids", items, token_count)
    return tuple(item for item in items if isinstance(item, int))


def _allowed_token_ids(value: object, token_count: int) -> tuple[int, ...] | None:
    if value is None:
        return None
    items = _items("allowed_token_ids", value, token_count, "token ids")
    if not items:
        raise InvalidRequest("allowed_token_ids is empty: nothing could be said.", param="allowed_token_ids")
    check_token_ids("allowed_token_ids", items, token_count)
    return tuple(dict.fromkeys(item for item in items if isinstance(item, int)))


def _bad_words(value: object) -> tuple[str, ...]:
    words = _items("bad_words", () if value is None else value, MAX_BAD_WORDS, "words")
    for word in words:
        if not isinstance(word, str) or not 1 <= len(word) <= MAX_BAD_WORD_LENGTH:
            raise _refuse("bad_words", f"made of strings of 1 to {MAX_BAD_WORD_LENGTH} characters", word)
    return tuple(word for word in words if isinstance(word, str))


def _bad_token_ids(value: object, token_count: int) -> tuple[tuple[int, ...], ...]:
    found = []
    for item in _items("bad_token_ids", value, 4 * MAX_BAD_WORDS, "sequences"):
        ids = _items("bad_token_ids", item, token_count, "token ids")
        check_token_ids("bad_token_ids", ids, token_count)
        found.append(tuple(token for token in ids if isinstance(token, int)))
    return tuple(dict.fromkeys(filter(None, found)))


def _logit_bias(value: object, token_count: int) -> tuple[tuple[int, float], ...]:
    pairs = tuple(value.items()) if isinstance(value, Mapping) else () if value is None else value
    items = _items("logit_bias", pairs, MAX_LOGIT_BIAS, "entries")
    biases: dict[int, float] = {}
    for item in items:
        if not isinstance(item, list | tuple) or len(item) != 2:
            raise _refuse("logit_bias", "a mapping of token ids to numbers", item)
        token = _bias_token(item[0])
        check_token_ids("logit_bias", (token,), token_count)
        if token in biases:
            raise InvalidRequest(f"logit_bias names token id {token} twice.", param="logit_bias")
        biases[token] = _bias(item[1])
    return tuple(biases.items())


def _bias_token(key: object) -> int:
    """JSON has string keys only, so `"42"` is token 42; nothing else that int() would take is."""
    if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 18:
        return int(key)
    if isinstance(key, int) and not isinstance(key, bool):
        return key
    raise _refuse("logit_bias", "a mapping of token ids to numbers", key)


def _bias(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
        raise _refuse("logit_bias", "made of numbers in [-100, 100]", value)
    return float(value)
