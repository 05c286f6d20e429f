"""Grammars in the executor: what may follow is a function of what was emitted, whatever happened to the steps."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from surefoot import grammar
from surefoot.core.engine import Engine
from surefoot.testing import request_of
from surefoot.types import Emitted, Grammar, Sample, Sampled, SamplingParams, StepDone, Vocabulary

if TYPE_CHECKING:
    from tests.device.driver import Driver, Sequence

EOS = 2
WORDS = (b'{"', b'": "', b'"}', b"ab", b"12", b", ")
TOKENS = (b"<unk>", b"<s>", b"</s>", *(bytes([byte]) for byte in range(256)), *WORDS)
VOCABULARY = Vocabulary(
    tokens=(*TOKENS, *(f"word{at}".encode() for at in range(320 - len(TOKENS)))), specials=(0, 1, 2)
)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 6}, "b": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
JSON = grammar.json_schema(SCHEMA, field="response_format")
_requests = itertools.count(1000)


@pytest.fixture(scope="module")
def taught(open_tiny: Callable[..., Driver]) -> Driver:
    driver = open_tiny()
    driver.device.executor.learn(VOCABULARY)
    return driver


def start(driver: Driver, what: Grammar, seed: int = 0, **params: object) -> tuple[Sequence, int]:
    """A sequence that must keep to a grammar, and a request number of its own."""
    sampling = SamplingParams(**({"temperature": 1.0, "grammar": what} | params))  # type: ignore[arg-type]
    return driver.sequence([5, 6, 7, 8 + seed], room=200, params=sampling, seed=seed), next(_requests)


def step(
    driver: Driver, rows: list[tuple[Sequence, int]], *, commit: bool = True, chunk: int | None = None
) -> str | None:
    """A step of these rows; the first error of a row, if there is one."""
    outcome = driver.run(*(driver.work(sequence, chunk, request) for sequence, request in rows))
    assert isinstance(outcome, StepDone), outcome
    for (sequence, _), row in zip(rows, outcome.rows, strict=True):
        if row.error is not None:
            return row.error
        if commit:
            sequence.fresh = False
            sequence.computed = min(len(sequence.tokens), sequence.computed + (chunk or len(sequence.tokens)))
            sequence.tokens += [sampled.token for sampled in row.samples]
            sequence.outputs += row.samples
    return None


def ended(sequence: Sequence) -> bool:
    return bool(sequence.outputs) and sequence.outputs[-1].token == EOS


def run(driver: Driver, *rows: tuple[Sequence, int], most: int = 150) -> list[str]:
    """The texts of rows that are all run to their end."""
    for _ in range(most):
        left = [row for row in rows if not ended(row[0])]
        if not left:
            break
        assert step(driver, left) is None
    return [text(sequence.outputs) for sequence, _ in rows]


def text(outputs: list[Sampled]) -> str:
    assert outputs[-1].token == EOS
    return b"".join(VOCABULARY.tokens[sampled.token] for sampled in outputs[:-1]).decode()


@pytest.mark.parametrize(
    ("what", "check"),
    [
        (JSON, lambda said: set(json.loads(said)) == {"a", "b"} and len(json.loads(said)["a"]) <= 6),
        (grammar.regex(r"[a-c]{3}-\d+(\.\d)?", field="x"), re.compile(r"[a-c]{3}-\d+(\.\d)?").fullmatch),
        (grammar.choice(["yes", 'n"o', "maybe"], field="x"), ["yes", 'n"o', "maybe"].__contains__),
        (grammar.cfg('start: "(" start ")" | "ab"', field="x"), re.compile(r"\(*ab\)*").fullmatch),
        (grammar.cfg('root ::= "x" [0-9]{2} | "y"', field="x"), re.compile(r"x\d\d|y").fullmatch),
    ],
    ids=["schema", "regex", "choice", "lark", "gbnf"],
)
def test_output_keeps_to_its_grammar(taught: Driver, what: Grammar, check: Callable[[str], object]) -> None:
    """A network with random weights writes what the grammar allows and nothing else, alone and beside others."""
    rows = [start(taught, what, seed) for seed in range(3)] + [start(taught, JSON, 9)]
    assert all(check(said) for said in run(taught, *rows)[:3])


def test_steps_that_are_done_again_change_nothing(taught: Driver) -> None:
    """Steps whose outcome is thrown away, as after a failure, leave no trace: the text is the one without them."""
    (plain,) = run(taught, start(taught, JSON, 4))
    sequence, request = start(taught, JSON, 4)
    for at in range(150):
        if ended(sequence):
            break
        if at % 3 == 1:
            step(taught, [(sequence, request)], commit=False)
        step(taught, [(sequence, request)])
    assert text(sequence.outputs) == plain


def test_a_matcher_that_ran_ahead_is_taken_back(taught: Driver) -> None:
    """With two steps in flight a failure takes back a token that the matcher has read: it follows the new one."""
    sequence, request = start(taught, grammar.regex("a{3}|b{3}|c{3}", field="x"), 3)
    step(taught, [(sequence, request)])
    step(taught, [(sequence, request)])
    sequence.tokens, sequence.outputs, sequence.computed = sequence.tokens[:4], [], 0
    sequence.seed = next(
        seed for seed in range(50) if first(taught, sequence, request, seed) != first(taught, sequence, request, 3)
    )
    assert len(set(run(taught, (sequence, request))[0])) == 1


def first(driver: Driver, sequence: Sequence, request: int, seed: int) -> int:
    sequence.seed = seed
    outcome = driver.run(driver.work(sequence, None, request))
    assert isinstance(outcome, StepDone)
    return outcome.rows[0].samples[0].token


def test_a_sequence_comes_back_after_its_matcher_was_forgotten(taught: Driver) -> None:
    """Recomputed from its tokens, in chunks, by an executor that knows nothing of it, a sequence goes on the same."""
    (plain,) = run(taught, start(taught, JSON, 7))
    sequence, request = start(taught, JSON, 7)
    for _ in range(6):
        step(taught, [(sequence, request)])
    again, _ = start(taught, JSON, 7)
    again.tokens, again.outputs, again.prompt = sequence.tokens, sequence.outputs, sequence.prompt
    other = next(_requests)
    while again.computed < len(again.tokens) - 1:
        assert step(taught, [(again, other)], chunk=3) is None
    assert run(taught, (again, other)) == [plain]


def test_children_of_one_prompt_draw_from_the_same_start(taught: Driver) -> None:
    """The first tokens of n children all keep to the grammar."""
    sequence, request = start(taught, grammar.regex("[ab][cd]", field="x"))
    work = taught.work(sequence, None, request)
    samples = tuple(Sample(child, 77 + child, 0) for child in range(16))
    outcome = taught.run(
        work.__class__(**{name: getattr(work, name) for name in work.__struct_fields__} | {"samples": samples})
    )
    assert isinstance(outcome, StepDone)
    drawn = {VOCABULARY.tokens[sampled.token] for sampled in outcome.rows[0].samples}
    assert drawn == {b"a", b"b"}


def dead_ends() -> Iterator[tuple[Grammar, dict[str, object], str]]:
    yield grammar.regex("ab", field="x"), {"min_tokens": 50}, "leaves no token that could follow"
    yield grammar.regex("ab", field="x"), {"allowed_token_ids": (3 + ord("z"),)}, "leaves no token that could follow"
    yield grammar.regex("(", field="x"), {}, "does not compile"


@pytest.mark.parametrize(("what", "params", "reason"), list(dead_ends()), ids=["min_tokens", "ids", "syntax"])
def test_a_dead_end_is_one_rows_failure(taught: Driver, what: Grammar, params: dict[str, object], reason: str) -> None:
    """A row that nothing can follow fails with the reason; the one beside it writes what it writes alone."""
    (alone,) = run(taught, start(taught, JSON, 5))
    beside, dead = start(taught, JSON, 5), start(taught, what, 6, **params)
    failed = None
    while failed is None:
        outcome = taught.run(*(taught.work(sequence, None, request) for sequence, request in (beside, dead)))
        assert isinstance(outcome, StepDone)
        for (sequence, _), row in zip((beside, dead), outcome.rows, strict=True):
            sequence.fresh, sequence.computed = False, len(sequence.tokens)
            sequence.tokens += [sampled.token for sampled in row.samples]
            sequence.outputs += row.samples
        failed = outcome.rows[1].error
    assert reason in failed
    assert "other requests are not affected" in failed
    assert run(taught, beside) == [alone]


def test_output_that_ignores_its_end_says_nothing_more(taught: Driver) -> None:
    """After the grammar's end only the end can be said again."""
    sequence, request = start(taught, grammar.choice(["yes"], field="x"))
    for _ in range(8):
        assert step(taught, [(sequence, request)]) is None
    drawn = [sampled.token for sampled in sequence.outputs]
    end = drawn.index(EOS)
    assert set(drawn[end:]) == {EOS}


def test_allowed_and_bad_tokens(taught: Driver) -> None:
    """Only allowed tokens are drawn; the last token of a bad sequence is not drawn after the others."""
    a, b, c = (3 + ord(letter) for letter in "abc")
    sequence = taught.sequence(
        [5, 6],
        room=200,
        params=SamplingParams(temperature=5.0, allowed_token_ids=(a, b, c), bad_token_ids=((a, b), (c,))),
    )
    request = next(_requests)
    for _ in range(60):
        assert step(taught, [(sequence, request)]) is None
    drawn = [sampled.token for sampled in sequence.outputs]
    assert set(drawn) == {a, b}
    assert (a, b) not in set(itertools.pairwise(drawn))


# ---- in the engine


def written(driver: Driver, count: int = 3) -> dict[tuple[int, int], str]:
    """What an engine writes for requests with grammars, three children each, beside one without."""
    driver.device.executor.learn(VOCABULARY)
    engine = Engine(driver.device.executor, driver.device.limits)
    found: dict[tuple[int, int], list[Sampled]] = {}
    for id in range(1, count + 1):
        settings = {
            "temperature": 1.0,
            "n": 3,
            "max_tokens": 120,
            "ignore_eos": False,
            "grammar": JSON if id > 1 else None,
        }
        engine.add(request_of(id, [5, 6, id] * (5 * id), **settings), now=0.0)
    for at in range(20_000):
        if not engine.has_work:
            break
        for event in engine.step(now=float(at)):
            assert isinstance(event, Emitted), event
            found.setdefault((event.request, event.child), []).append(event.sampled)
    assert not engine.has_work
    return {key: text(outputs) for key, outputs in found.items() if key[0] > 1}


def test_failed_steps_and_preemption_change_no_text(open_tiny: Callable[..., Driver]) -> None:
    """Steps that run out of memory, rows that have to wait and prompts in chunks leave every text as it is."""
    calm = written(open_tiny())
    hard = {
        "faults": "execute:oom:p=0.15",
        "allow_fault_injection": True,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
    }
    assert written(open_tiny(**hard)) == calm
    assert len(calm) == 6
    assert all(set(json.loads(said)) == {"a", "b"} for said in calm.values())
