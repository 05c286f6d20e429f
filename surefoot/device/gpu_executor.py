"""Steps on a GPU: launched without waiting, collected behind an event, so that two can be in flight.

Everything a step needs of an earlier one stays on the device: drawn tokens go into the token pool, and the next step's
inputs are read from there. A step of decode rows alone is one replay of a captured graph; any other runs eagerly.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from surefoot.device import memory
from surefoot.device.gpu_cache import GpuCache
from surefoot.device.gpu_inputs import BlockTables, Draw, Shape, Staging, pack
from surefoot.device.gpu_runner import MOST_FORKS, PREFILL_ROWS, GpuRunner
from surefoot.device.gpu_sampler import GpuSampler, Key, Outcome, read, to_host
from surefoot.device.grammar import DeadEnd, Grammars, Mask
from surefoot.device.sampler import NOTHING_ALLOWED
from surefoot.faults import Faults
from surefoot.types import (
    PENDING,
    FailureKind,
    Limits,
    RowDone,
    Sampled,
    SamplingParams,
    StepDone,
    StepFailed,
    StepPlan,
    Ticket,
    Vocabulary,
    Work,
)

log = logging.getLogger(__name__)


@dataclass
class Flight:
    """A launched plan: how to read what becomes of it, or why it failed at once."""

    plan: StepPlan
    works: tuple[Work, ...] = ()
    draws: Sequence[Draw] = ()
    outcome: Outcome | None = None
    token_finite: Tensor | None = None
    passed: torch.cuda.Event | None = None
    failure: memory.Failure | None = None
    dead: Mapping[Key, str] = field(default_factory=dict)
    """Rows whose grammar lets nothing follow, and why."""
    began: float = 0.0


class GpuExecutor:
    """`types.Executor` for CUDA devices."""

    def __init__(self, runner: GpuRunner, limits: Limits, faults: Faults) -> None:
        self._runner = runner
        self._cache: GpuCache = runner.cache
        self._limits = limits
        self.faults = faults
        slots, device = limits.max_num_seqs + 1, runner.device
        self._pad_slot = limits.max_num_seqs
        width = -(-limits.max_model_len // limits.block_size)
        self._tables = BlockTables(slots, width, sink=self._cache.sink, device=device)
        self._pool = torch.zeros(slots, limits.max_model_len + 1, dtype=torch.int32, device=device)
        most = max_draws(limits)
        tokens = limits.max_num_batched_tokens + limits.max_num_seqs
        self._staging = Staging(tokens=tokens, rows=limits.max_num_seqs + PREFILL_ROWS, samples=most, device=device)
        self._grammars = Grammars(
            eos=limits.eos_token_ids, token_count=runner.spec.token_count, rows=limits.max_num_seqs
        )
        self._sampler = GpuSampler(runner.spec, most=most, device=device)
        self._flights: deque[Flight] = deque()

    # ---- types.Executor ----------------------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> Ticket:
        """Start a plan. Never raises for a step that fails: the failure is what `collect` returns."""
        began = time.perf_counter()
        outcome = memory.guard(lambda: self._start(plan))
        if isinstance(outcome, memory.Failure):
            self._tables.forget()
            self._flights.append(Flight(plan, failure=outcome, began=began))
        else:
            outcome.value.began = began
            self._flights.append(outcome.value)
        return Ticket(plan.id)

    def collect(self, ticket: Ticket) -> StepDone | StepFailed:
        """Wait for the oldest launched plan, which must be the ticket's, and read its outcome."""
        flight = self._flights.popleft()
        if flight.plan.id != ticket.plan:
            raise ValueError(f"Plan {ticket.plan} is not the oldest in flight; tickets are collected once, in order.")
        outcome = memory.guard(lambda: self._finish(flight)) if flight.failure is None else flight.failure
        if isinstance(outcome, memory.Ok):
            return StepDone(plan=flight.plan.id, rows=outcome.value, seconds=time.perf_counter() - flight.began)
        if outcome.kind is not FailureKind.OOM:
            log.error("step %d failed: %s", flight.plan.id, outcome.trace)
        return StepFailed(
            plan=flight.plan.id, kind=outcome.kind, reason=outcome.reason, needed=outcome.needed, free=outcome.free,
            cause=outcome.cause,
        )  # fmt: skip

    def free_memory(self) -> int:
        """Bytes that are free on the card."""
        return memory.free_memory()

    def move(self, pairs: Sequence[tuple[int, int]]) -> str | None:
        """Copy KV blocks (from, to)."""
        outcome = memory.guard(lambda: self._cache.move(pairs))
        return None if isinstance(outcome, memory.Ok) else outcome.reason

    def hold(self, blocks: int) -> str | None:
        """Map memory for the first `blocks` KV blocks and give the rest back to the card."""
        outcome = memory.guard(lambda: self._cache.hold(blocks))
        return None if isinstance(outcome, memory.Ok) else outcome.reason

    def learn(self, vocabulary: Vocabulary) -> None:
        """What tokens stand for, as grammars need to know."""
        self._grammars.learn(vocabulary)

    @torch.inference_mode()
    def capture(self, shape: Shape) -> None:
        """Capture the graph of a shape, after one eager run of the same."""
        arrays = self._staging.begin(shape)
        pack(arrays, (), shape, block_size=self._limits.block_size, pad_slot=self._pad_slot)
        self._staging.send(shape)
        tensors = self._staging.tensors(shape)
        self._runner.padded_step(tensors, self._tables.device, self._pool)
        torch.cuda.synchronize()
        self._runner.capture(tensors, self._tables.device, self._pool)

    # ---- launch ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _start(self, plan: StepPlan) -> Flight:
        struck = self.faults.begin(tokens=plan.tokens, control=plan.control)
        if "execute:oom" in struck:
            raise torch.OutOfMemoryError("injected by SUREFOOT_FAULTS")
        if "execute:raise" in struck:
            raise ValueError("injected by SUREFOOT_FAULTS")
        works = (self._control_work(),) if plan.control else _decodes_first(plan.works)
        self._cache.copy(plan.copies)
        self._admit(works)
        self._grammars.prepare(works)
        found = None if plan.control or "row:nan" in struck else self._graph_shape(works)
        shape = found or _exact_shape(works)
        arrays = self._staging.begin(shape)
        draws = pack(arrays, works, shape, block_size=self._limits.block_size, pad_slot=self._pad_slot)
        self._staging.send(shape)
        self._tell_tables(works)
        tensors = self._staging.tensors(shape)
        if found is not None:
            logits, finite = self._runner.replay(shape)
        else:
            prefills = [(len(work.tokens), work.end) for work in works if len(work.tokens) > 1]
            hidden, finite = self._runner.forward(tensors, self._tables.device, self._pool, prefills)
            if "row:nan" in struck and plan.works:
                finite[: len(works[0].tokens)] = False
            logits = self._runner.logits(hidden) if draws else hidden
        allowed, dead = self._allowed(works)
        outcome = self._sampler.launch(logits, draws, tensors.rows, self._pool, allowed) if draws else None
        token_finite = to_host(finite)
        passed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        passed.record()
        return Flight(plan, works, draws, outcome, token_finite, passed, dead=dead)

    def _allowed(self, works: Sequence[Work]) -> tuple[dict[Key, Mask], dict[Key, str]]:
        """What may follow in rows with a grammar, and those that are at a dead end.

        The forward pass is running by now: the host waits for the tokens of the plan before, and no longer.
        """
        allowed: dict[Key, Mask] = {}
        dead: dict[Key, str] = {}
        for work in works:
            if not work.samples or work.params.grammar is None:
                continue
            pending = self._pending_token(work)
            if work.tokens[-1] == PENDING and pending is None:
                continue  # the plan before failed, and this one will be dropped with it
            try:
                allowed[work.key] = self._grammars.allowed(work, partial(self._tail, work, pending))
            except DeadEnd as error:
                dead[work.key] = f"{error}; other requests are not affected."
        return allowed, dead

    def _pending_token(self, work: Work) -> int | None:
        """The input of `work` that the plan before draws."""
        before = self._flights[-1] if self._flights else None
        if work.tokens[-1] != PENDING or before is None or before.passed is None or before.outcome is None:
            return None
        before.passed.synchronize()
        for each in before.draws:
            if each.work.key == work.key and each.sample.child == work.child:
                return int(before.outcome.tokens[each.place])
        return None

    def _tail(self, work: Work, pending: int | None, count: int) -> list[int]:
        """The last `count` tokens up to and with the inputs of `work`; what the plan does not say is read back."""
        known = [*work.tokens] if pending is None else [*work.tokens[:-1], pending]
        if count > len(known):
            row = self._pool[work.slot, work.end - count : work.start]
            known = [*row.tolist(), *known]
        return known[len(known) - count :]

    def _graph_shape(self, works: Sequence[Work]) -> Shape | None:
        """The captured shape that this step can be padded to; steps with forks have more draws than rows, and none."""
        if any(len(work.samples) > 1 for work in works):
            return None
        decodes = sum(len(work.tokens) == 1 for work in works)
        return self._runner.find(sum(len(work.tokens) for work in works), decodes, len(works) - decodes)

    def _admit(self, works: Sequence[Work]) -> None:
        """History of rows whose slot does not hold it: children that stand on their parent's blocks."""
        for work in works:
            if work.known is not None:
                known = torch.tensor(work.known, dtype=torch.int32, device=self._pool.device)
                self._pool[work.slot, : len(work.known)] = known

    def _tell_tables(self, works: Sequence[Work]) -> None:
        """Send what changed in the block tables."""
        updates = self._tables.updates(works)
        if updates:
            told = torch.tensor(updates, dtype=torch.int64).pin_memory().to(self._pool.device, non_blocking=True)
            self._tables.device.view(-1)[told[:, 0]] = told[:, 1].int()

    def _control_work(self) -> Work:
        """One padding row on the sink block, in the slot that no sequence has."""
        return Work(
            request=-1, child=0, epoch=0, slot=self._pad_slot, start=0, tokens=(0,), table=(self._cache.sink,),
            known=None, samples=(), params=SamplingParams(), decoding=False,
        )  # fmt: skip

    # ---- collect -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _finish(self, flight: Flight) -> tuple[RowDone, ...]:
        assert flight.passed is not None
        flight.passed.synchronize()
        if flight.plan.control:
            return ()
        sampled = read(flight.outcome, flight.draws) if flight.outcome is not None else []
        tokens: dict[tuple[int, int], list[Sampled]] = {work.key: [] for work in flight.works}
        bad = _bad_rows(flight)
        for draw, token in zip(flight.draws, sampled, strict=True):
            if token is None:
                bad.add(draw.work.key)
            else:
                tokens[draw.work.key].append(token)
        bad |= flight.dead.keys()
        done = {
            work.key: RowDone(error=_why(flight, work)) if work.key in bad else RowDone(samples=tuple(tokens[work.key]))
            for work in flight.works
        }
        size = self._limits.block_size
        self._cache.zero([b for w in flight.works if w.key in bad for b in w.table[w.start // size :]])
        return tuple(done[work.key] for work in flight.plan.works)


def max_draws(limits: Limits) -> int:
    """The most tokens that one step draws: a row each, or the children of one prompt (n ≤ 128)."""
    return limits.max_num_seqs + MOST_FORKS


def _decodes_first(works: tuple[Work, ...]) -> tuple[Work, ...]:
    return tuple(sorted(works, key=lambda work: len(work.tokens) > 1))


def _exact_shape(works: Sequence[Work]) -> Shape:
    """Of an eager step: a sample per draw (one that goes nowhere where there is none), nothing padded."""
    return Shape(
        tokens=sum(len(work.tokens) for work in works),
        decode_rows=sum(len(work.tokens) == 1 for work in works),
        rows=len(works),
        samples=max(1, sum(len(work.samples) for work in works)),
    )


def _bad_rows(flight: Flight) -> set[tuple[int, int]]:
    if flight.token_finite is None or bool(flight.token_finite.all()):
        return set()
    bad, at = set(), 0
    for work in flight.works:
        if not bool(flight.token_finite[at : at + len(work.tokens)].all()):
            bad.add(work.key)
        at += len(work.tokens)
    return bad


def _why(flight: Flight, work: Work) -> str:
    """What is wrong with a row: its grammar, its numbers, or that nothing it is allowed to say is left."""
    if work.key in flight.dead:
        return flight.dead[work.key]
    restricted = work.params.grammar is not None or work.params.allowed_token_ids is not None
    return NOTHING_ALLOWED if restricted and work.key not in _bad_rows(flight) else _not_finite(work)


def _not_finite(work: Work) -> str:
    return (
        f"The model computed a value that is not finite (NaN or infinity) at positions {work.start} to {work.end - 1} "
        f"of this request; other requests are not affected."
    )
