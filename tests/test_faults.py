"""The grammar of SUREFOOT_FAULTS."""

from __future__ import annotations

import pytest

from surefoot.errors import ConfigError
from surefoot.faults import Faults


def test_a_step_rule_strikes_that_step_once() -> None:
    """step=N strikes the N-th step; control steps are not counted and not struck."""
    faults = Faults.parse("execute:oom:step=2")
    struck = [faults.begin(tokens=1, control=control) for control in (False, True, False, True, False)]
    assert struck == [frozenset(), frozenset(), {"execute:oom"}, frozenset(), frozenset()]


def test_a_token_rule_strikes_larger_steps() -> None:
    """tokens>N strikes every step of more than N tokens."""
    faults = Faults.parse("execute:raise:tokens>64")
    assert [bool(faults.begin(tokens=tokens, control=False)) for tokens in (64, 65, 1)] == [False, True, False]


def test_a_probability_strikes_about_that_part_of_all_steps() -> None:
    """p=0.2 strikes a fifth of all steps, control steps too, and the same ones for the same seed."""
    runs = [
        [bool(faults.begin(tokens=1, control=True)) for _ in range(2000)]
        for faults in map(Faults.parse, ["execute:oom:p=0.2"] * 2)
    ]
    assert 330 < sum(runs[0]) < 470
    assert runs[0] == runs[1]


def test_rules_combine() -> None:
    """Rules are separated by commas or semicolons and strike together."""
    faults = Faults.parse("execute:oom:step=1; row:nan:tokens>3 ,")
    assert faults.begin(tokens=4, control=False) == {"execute:oom", "row:nan"}


@pytest.mark.parametrize(
    "text", ["execute:oom", "execute:burn:step=1", "row:nan:step>1", "execute:oom:p=1.5", "execute:oom:tokens=4", "x"]
)
def test_bad_text_is_refused_by_name(text: str) -> None:
    """A rule that is none is a ConfigError that quotes it."""
    with pytest.raises(ConfigError, match=text.replace(".", r"\.")):
        Faults.parse(f"execute:oom:step=1,{text}")
