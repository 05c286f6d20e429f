"""One plan in, one outcome out: the device's side of a step."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from surefoot import plan as planning
from surefoot.config import format_bytes
from surefoot.device import memory
from surefoot.device.grammar import DeadEnd, Grammars
from surefoot.device.inputs import StepInputs, TokenPool, build, control_work
from surefoot.device.runner import Runner
from surefoot.device.sampler import NOTHING_ALLOWED, Row, Sampler
from surefoot.faults import Faults
from surefoot.ops.linear import few_sizes
from surefoot.plan import QUERY_TILE
from surefoot.types import (
    FailureKind,
    RowDone,
    Sample,
    Sampled,
    StepDone,
    StepFailed,
    StepPlan,
    Ticket,
    Vocabulary,
    Work,
)

Progress = Callable[[str, float], None]
log = logging.getLogger(__name__)


class StepExecutor:
    """`types.Executor` with one plan in flight: launch runs the step, collect hands out what became of it."""

    def __init__(self, runner: Runner, sampler: Sampler, plan: planning.MemoryPlan, faults: Faults) -> None:
        self.runner = runner
        self.sampler = sampler
        self.cost = plan.cost
        self.faults = faults
        self.pool = TokenPool(plan.max_num_seqs + 1, plan.max_model_len)
        self._control_slot = plan.max_num_seqs
        self._grammars = Grammars(eos=sampler.eos, token_count=sampler.token_count, rows=plan.max_num_seqs)
        self._outcomes: deque[StepDone | StepFailed] = deque()
        self._swollen = False

    def launch(self, plan: StepPlan) -> Ticket:
        """Run a plan. Never raises for a step that fails: the failure is what `collect` returns."""
        self._outcomes.append(self._refuse(plan) or self._run(plan))
        return Ticket(plan.id)

    def collect(self, ticket: Ticket) -> StepDone | StepFailed:
        """The outcome of the oldest launched plan, which must be the ticket's."""
        if not self._outcomes or self._outcomes[0].plan != ticket.plan:
            raise ValueError(f"Plan {ticket.plan} is not the oldest in flight; tickets are collected once, in order.")
        return self._outcomes.popleft()

    def free_memory(self) -> int:
        """Bytes that a step could still allocate."""
        return memory.free_memory()

    def move(self, pairs: Sequence[tuple[int, int]]) -> str | None:
        """Copy KV blocks (from, to)."""
        outcome = memory.guard(lambda: self.runner.cache.move(pairs))
        return None if isinstance(outcome, memory.Ok) else outcome.reason

    def hold(self, blocks: int) -> str | None:
        """Give the pages of KV blocks from `blocks` on back; to take them again costs nothing until they are used."""
        self.runner.cache.hold(blocks)
        memory.release_cached()
        return None

    def learn(self, vocabulary: Vocabulary) -> None:
        """What tokens stand for, as grammars need to know."""
        self._grammars.learn(vocabulary)

    def predict(self, plan: StepPlan) -> int:
        """Bytes that a plan's step is going to allocate."""
        works = plan.works
        prompts = [work.end for work in works if len(work.tokens) > 1]
        decoding = [work.end for work in works if len(work.tokens) == 1]
        together = max(decoding, default=0) * len(decoding)
        return self.cost.bytes(
            tokens=plan.tokens,
            logit_rows=sum(bool(work.samples) for work in works),
            longest=max([*prompts, together // QUERY_TILE, 1]),
            gathered=max([*prompts, together, 1]),
        )

    def warm_up(self) -> None:
        """Run control steps and a small prompt: threads start and libraries load now, while there is room for them.

        oneDNN maps code for every number of rows it meets. A step that is tried because nothing larger fits must find
        its own there, and so must the rows that decode beside it. All write only to the sink. Raises what a step
        raised.
        """
        cache, most = self.runner.cache, self.pool.tokens.shape[1] - 1
        control = control_work(cache, self._control_slot)
        row = replace(control, samples=(Sample(child=0, seed=0, index=0),))
        small = min(cache.block_size + self.pool.tokens.shape[0] - 1, QUERY_TILE)
        self._step(StepPlan(id=0, works=(), control=True))
        for rows in sorted({few_sizes(rows) for rows in range(1, small + 1)}):
            self._step(StepPlan(id=0, works=(row,) * rows))
        tokens = min(QUERY_TILE + 1, most)
        table = (cache.sink,) * -(-tokens // cache.block_size)
        prompt = replace(row, tokens=(0,) * tokens, table=table)
        self._step(StepPlan(id=0, works=(prompt,)))
        cache.zero([cache.sink])

    # ---- one step -------------------------------------------------------------------------------------------------

    def _refuse(self, plan: StepPlan) -> StepFailed | None:
        """A step that cannot fit fails before it is tried.

        Not so a control step, nor one at the floor of a block: a request is failed for what happened there, which
        must not be a prediction.
        """
        if plan.control or plan.tokens <= self.runner.cache.block_size:
            return None
        needed, free = self.predict(plan), self.free_memory()
        if needed <= free:
            return None
        reason = f"a step of {plan.tokens} tokens needs {format_bytes(needed)}, and {format_bytes(free)} are free"
        return StepFailed(
            plan=plan.id, kind=FailureKind.OOM, reason=reason, needed=needed, free=free, cause="predicted"
        )

    def _run(self, plan: StepPlan) -> StepDone | StepFailed:
        began = time.perf_counter()
        outcome = memory.guard(lambda: self._step(plan))
        if isinstance(outcome, memory.Failure):
            if outcome.kind is not FailureKind.OOM:
                log.error("step %d failed: %s", plan.id, outcome.trace)
            needed = outcome.needed  # not every error tells what was asked for
            if needed is None and outcome.kind is FailureKind.OOM:
                needed = self.predict(plan)
            return StepFailed(
                plan=plan.id, kind=outcome.kind, reason=outcome.reason, needed=needed, free=outcome.free,
                cause=outcome.cause,
            )  # fmt: skip
        self._trim(plan.tokens)
        return StepDone(plan=plan.id, rows=outcome.value, seconds=time.perf_counter() - began)

    @torch.inference_mode()
    def _step(self, plan: StepPlan) -> tuple[RowDone, ...]:
        struck = self.faults.begin(tokens=plan.tokens, control=plan.control)
        if "execute:oom" in struck:
            raise MemoryError("injected by SUREFOOT_FAULTS")
        if "execute:raise" in struck:
            raise ValueError("injected by SUREFOOT_FAULTS")
        works = (control_work(self.runner.cache, self._control_slot),) if plan.control else plan.works
        self.runner.cache.copy(plan.copies)
        for work in works:
            self.pool.admit(work)
        self._grammars.prepare(works)
        inputs = build(works, self.pool, self.runner.cache, self.runner.group, self.runner.windows)
        hidden = self.runner.forward(inputs)
        if "row:nan" in struck and plan.works:
            self._poison(hidden, inputs, works)
        outcomes = self._finish(works, inputs, hidden)
        return () if plan.control else tuple(outcomes)

    def _finish(self, works: tuple[Work, ...], inputs: StepInputs, hidden: Tensor) -> list[RowDone]:
        """Sample the rows that are asked for and finite; the others are zeroed (law 4) and say why."""
        finite = _finite_spans(hidden, inputs)
        asked = [at for at, fine in zip(inputs.order, finite, strict=True) if fine and works[at].samples]
        last = {at: end - 1 for at, (_, end) in zip(inputs.order, inputs.spans, strict=True)}
        drawn: dict[int, tuple[Sampled, ...] | None] = {}
        errors = {at: _not_finite(works[at]) for at, fine in zip(inputs.order, finite, strict=True) if not fine}
        if asked:
            logits = self.runner.logits(hidden, [last[at] for at in asked])
            fine_rows = _finite_rows(logits)
            errors |= {at: _not_finite(works[at]) for at, fine in zip(asked, fine_rows, strict=True) if not fine}
            rows = [self._row(works[at], errors, at) for at in asked]
            drawn = dict(zip(asked, self.sampler.sample(logits, rows), strict=True))
        errors = {at: NOTHING_ALLOWED for at, tokens in drawn.items() if tokens is None} | errors
        self._clear([works[at] for at in errors])
        return [
            RowDone(error=errors[at]) if at in errors else self._row_done(work, drawn.get(at) or ())
            for at, work in enumerate(works)
        ]

    def _row(self, work: Work, errors: dict[int, str], at: int) -> Row:
        """What the sampler needs; a row whose grammar is at a dead end is noted in `errors`."""
        history = self.pool.history(work)
        if work.params.grammar is None or at in errors:
            return Row(work, history)
        try:
            return Row(
                work, history, self._grammars.allowed(work, lambda count: history[len(history) - count :].tolist())
            )
        except DeadEnd as error:
            errors[at] = f"{error}; other requests are not affected."
            return Row(work, history)

    def _row_done(self, work: Work, drawn: tuple[Sampled, ...]) -> RowDone:
        """The row's own next token goes into the pool; forked children bring theirs along when they are admitted."""
        for sample, sampled in zip(work.samples, drawn, strict=True):
            if sample.child == work.child:
                self.pool.put(work.slot, work.end, sampled.token)
        return RowDone(samples=drawn)

    def _clear(self, works: list[Work]) -> None:
        size = self.runner.cache.block_size
        self.runner.cache.zero([block for work in works for block in work.table[work.start // size :]])

    def _poison(self, hidden: Tensor, inputs: StepInputs, works: tuple[Work, ...]) -> None:
        """What a numerical fault of the plan's first row would leave behind: NaN in its hidden rows and its blocks."""
        begin, end = inputs.spans[inputs.order.index(0)]
        hidden[begin:end] = torch.nan
        for layer in range(self.runner.spec.num_layers):
            self.runner.cache.token_rows(layer)[inputs.store_index[begin:end]] = torch.nan

    def _trim(self, tokens: int) -> None:
        """Give a prompt's memory back once steps are small again."""
        if tokens > QUERY_TILE:
            self._swollen = True
        elif self._swollen:
            self._swollen = False
            memory.release_cached()


def _finite_spans(hidden: Tensor, inputs: StepInputs) -> list[bool]:
    rows = _finite_rows(hidden)
    return [all(rows[begin:end]) for begin, end in inputs.spans]


def _finite_rows(x: Tensor) -> list[bool]:
    """Whether each row [n, …] is free of NaN and infinity: both survive a sum of magnitudes."""
    fine: list[bool] = x.abs().sum(-1).isfinite().tolist()
    return fine


def _not_finite(work: Work) -> str:
    return (
        f"The model computed a value that is not finite (NaN or infinity) at positions {work.start} to {work.end - 1} "
        f"of this request; other requests are not affected."
    )
