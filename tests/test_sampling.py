"""Sampling parameters: what is refused, by which name, and what the canonical form is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.errors import InvalidRequest
from surefoot.sampling import shown, validate
from surefoot.types import SamplingParams

TOKENS = 100

BAD: list[tuple[str, Any]] = [
    *(("n", value) for value in (0, 129, 1.0, True, None, "1")),
    *(("max_tokens", value) for value in (0, -1, 2**63, 1.0, True)),
    *(("min_tokens", value) for value in (-1, 17, 1.0, None)),
    *(("temperature", value) for value in (-0.1, 100.1, float("nan"), float("inf"), True, None, "1", 10**400)),
    *(("top_p", value) for value in (0, 0.0, 1.01, float("nan"), None, "1")),
    *(("top_k", value) for value in (-2, 1.0, None, True)),
    *(("min_p", value) for value in (-0.1, 1.1, float("nan"))),
    *(("repetition_penalty", value) for value in (0, 0.001, 101, float("nan"))),
    *(("presence_penalty", value) for value in (-2.1, 2.1, float("inf"))),
    *(("frequency_penalty", value) for value in (-2.1, 2.1, float("nan"))),
    *(("seed", value) for value in (2**63, -(2**63) - 1, 1.0, True)),
    *(("logprobs", value) for value in (-1, 21, True, 1.0)),
    *(("stop", value) for value in ("", [""], [1], 5, ["a"] * 17, ["a" * 1001])),
    *(("stop_token_ids", value) for value in ([100], [-1], ["1"], [True], 5, [1] * 129)),
    *(("logit_bias", value) for value in ({100: 1}, {-1: 1}, {"x": 1}, {1: 101}, {1: float("nan")}, {1: 10**400},
                                          {1: "1"},
                                          [1], 5, {1: 1, "1": 2}, {"9" * 30: 1}, {True: 1})),
    *(("ignore_eos", value) for value in (1, None)),
    *(("skip_special_tokens", value) for value in (1, None)),
    *(("include_stop_str_in_output", value) for value in ("no",)),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), BAD)
def test_refused_by_name(field: str, value: object) -> None:
    """Whatever is out of range or of the wrong type is refused with the field's name and a short message."""
    with pytest.raises(InvalidRequest) as caught:
        validate(SamplingParams(**{field: value}), token_count=TOKENS)  # type: ignore[arg-type]
    assert caught.value.param == field
    assert caught.value.message.startswith(field)
    assert len(caught.value.message) < 300


def test_too_many_biases() -> None:
    """The number of biased tokens is limited."""
    with pytest.raises(InvalidRequest, match="at most 1,024 entries, got 1,025"):
        validate(SamplingParams(logit_bias=tuple((i, 1.0) for i in range(1025))), token_count=5000)


def test_canonical_form() -> None:
    """Convenient spellings become the one form that the engine reads."""
    loose: Any = {"stop": "a", "stop_token_ids": [3], "logit_bias": {"7": 1, 8: -2.5}, "top_k": -1, "temperature": 1}
    params = validate(SamplingParams(**loose), token_count=TOKENS)
    assert params.stop == ("a",)
    assert params.stop_token_ids == (3,)
    assert params.logit_bias == ((7, 1.0), (8, -2.5))
    assert params.top_k == 0
    assert isinstance(params.temperature, float)


def test_bounds_are_included() -> None:
    """The ends of every range are allowed, and greedy decoding may have several children."""
    low = SamplingParams(
        n=1, temperature=0, top_p=1e-300, min_p=0, repetition_penalty=0.01, presence_penalty=-2, logprobs=0
    )
    high = SamplingParams(
        n=128, temperature=100, top_p=1, min_p=1, repetition_penalty=100, presence_penalty=2, frequency_penalty=2,
        logprobs=20, logit_bias=((99, 100.0),), stop_token_ids=(99,), stop=("x" * 1000,) * 16, min_tokens=16,
    )  # fmt: skip
    assert validate(low, token_count=TOKENS).top_p > 0
    assert validate(high, token_count=TOKENS).n == 128
    assert validate(SamplingParams(n=2, temperature=0), token_count=TOKENS).greedy


@given(st.integers(-(2**63), 2**63 - 1).filter(lambda seed: seed != -1))
def test_seeds_stay_distinct(seed: int) -> None:
    """Every signed 64-bit seed maps to an unsigned one of its own."""
    found = validate(SamplingParams(seed=seed), token_count=TOKENS).seed
    assert found is not None
    assert 0 <= found < 2**64
    assert (found - seed) % 2**64 == 0


@pytest.mark.parametrize("seed", [None, -1])
def test_seeds_are_drawn(seed: int | None) -> None:
    """Without a seed each call draws another one."""
    drawn = {validate(SamplingParams(seed=seed), token_count=TOKENS).seed for _ in range(5)}
    assert len(drawn) == 5
    assert None not in drawn


@given(
    st.recursive(
        st.none() | st.text() | st.integers() | st.floats(), lambda inner: st.lists(inner, max_size=3), max_leaves=5
    )
)
def test_shown_is_short_and_encodable(value: object) -> None:
    """What an error message quotes fits on a line and into JSON."""
    text = shown(value)
    text.encode()
    assert len(text) <= 80


def test_shown_of_a_huge_integer() -> None:
    """Even integers too long for Python to print can be quoted."""
    assert shown(10**5000) == "an integer of 16610 bits"
