"""Failures on cue, to prove that they stay where they are: the grammar of SUREFOOT_FAULTS.

Rules are separated by commas or semicolons:

    execute:oom:p=0.05       every step runs out of memory with this probability, control steps too
    execute:oom:step=7       the seventh step does (control steps are not counted)
    execute:oom:tokens>64    every step of more than 64 input tokens does
    execute:raise:step=5     the fifth step raises an error that has nothing to do with memory
    row:nan:step=9           the first row of the ninth step computes a NaN

`execute` takes oom or raise, with any of the three conditions. `row:nan` takes p, step or tokens in the same way.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

from surefoot.errors import ConfigError

ACTIONS = ("execute:oom", "execute:raise", "row:nan")


@dataclass(frozen=True)
class Rule:
    """What to do (`action`, of ACTIONS) and when: `kind` p, step or tokens against `value`."""

    action: str
    kind: str
    value: float

    def holds(self, *, step: int, tokens: int, chance: float) -> bool:
        if self.kind == "p":
            return chance < self.value
        return step == self.value if self.kind == "step" else tokens > self.value


@dataclass
class Faults:
    """The rules, and the count of steps so far. Chances come from a generator of their own, seeded."""

    rules: tuple[Rule, ...] = ()
    seed: int = 0
    steps: int = 0
    _random: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    @classmethod
    def parse(cls, text: str, *, seed: int = 0) -> Faults:
        """Rules out of text such as "execute:oom:p=0.05, row:nan:step=9". Raises ConfigError naming the bad one."""
        rules = [_parse_rule(part.strip()) for part in re.split(r"[,;]", text) if part.strip()]
        return cls(tuple(rules), seed)

    def begin(self, *, tokens: int, control: bool) -> frozenset[str]:
        """Count a step and return the actions that strike it."""
        if not control:
            self.steps += 1
        step = 0 if control else self.steps
        return frozenset(
            rule.action for rule in self.rules if rule.holds(step=step, tokens=tokens, chance=self._random.random())
        )


def _parse_rule(text: str) -> Rule:
    match = re.fullmatch(r"(\w+:\w+):(?:(p|step)=|(tokens)>)(\d+(?:\.\d+)?)", text)
    if match is None or match[1] not in ACTIONS:
        raise ConfigError(
            f"SUREFOOT_FAULTS: {text!r} is not a rule. Write {', '.join(ACTIONS)} followed by :p=0.05, :step=7 "
            f"or :tokens>64."
        )
    kind, value = match[2] or match[3], float(match[4])
    if kind == "p" and value > 1:
        raise ConfigError(f"SUREFOOT_FAULTS: {text!r}: a probability is at most 1.")
    return Rule(match[1], kind, value)
