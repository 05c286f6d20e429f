"""Hands to drive an executor with: plans made by hand, their outcomes applied."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from surefoot.device.executor import StepExecutor
from surefoot.device.inputs import build
from surefoot.device.start import Device
from surefoot.types import RowDone, Sample, Sampled, SamplingParams, StepDone, StepFailed, StepPlan, Work

GREEDY = SamplingParams(temperature=0.0, logprobs=3)


@dataclass
class Sequence:
    """A sequence that a test drives by hand: its tokens, how many are computed, and the blocks that it holds."""

    tokens: list[int]
    slot: int
    blocks: list[int]
    params: SamplingParams = GREEDY
    seed: int = 0
    computed: int = 0
    prompt: int = 0
    outputs: list[Sampled] = field(default_factory=list)
    fresh: bool = True

    def __post_init__(self) -> None:
        self.prompt = self.prompt or len(self.tokens)


@dataclass
class Driver:
    """Makes plans for sequences and applies their outcomes."""

    device: Device
    plans: int = 0
    free_slots: int = 0
    free_block: int = 0

    def sequence(
        self, tokens: Iterable[int], *, room: int = 64, params: SamplingParams = GREEDY, seed: int = 0
    ) -> Sequence:
        """A sequence on blocks and a slot of its own, with room for more tokens."""
        tokens = list(tokens)
        limits = self.device.limits
        count = -(-(len(tokens) + room) // limits.block_size)
        blocks = [(self.free_block + at) % limits.num_blocks for at in range(count)]
        self.free_block += count
        slot = self.free_slots % limits.max_num_seqs
        self.free_slots += 1
        # Blocks out of order, since nothing may depend on their order.
        return Sequence(tokens, slot, blocks[1::2] + blocks[::2], params, seed)

    def work(self, sequence: Sequence, chunk: int | None = None, request: int = 0) -> Work:
        """The next `chunk` tokens (all, without); sampled where they reach the end."""
        start = sequence.computed
        given = tuple(sequence.tokens[start:][:chunk])
        end = start + len(given)
        known = tuple(sequence.tokens[:start]) if sequence.fresh else None
        samples = (Sample(0, sequence.seed, len(sequence.outputs)),) if end == len(sequence.tokens) else ()
        size = self.device.limits.block_size
        return Work(
            request=request,
            child=0,
            epoch=0,
            slot=sequence.slot,
            start=start,
            tokens=given,
            table=tuple(sequence.blocks[: -(-end // size)]),
            known=known,
            samples=samples,
            params=sequence.params,
            decoding=bool(sequence.outputs) and len(given) == 1,
        )

    def run(
        self, *works: Work, control: bool = False, copies: tuple[tuple[int, int], ...] = ()
    ) -> StepDone | StepFailed:
        """Launch and collect one plan."""
        self.plans += 1
        plan = StepPlan(id=self.plans, works=works, control=control, copies=copies)
        return self.device.executor.collect(self.device.executor.launch(plan))

    def step(self, sequences: list[Sequence], chunk: int | None = None) -> list[RowDone]:
        """One step of all of them together, committed."""
        outcome = self.run(*(self.work(each, chunk, at) for at, each in enumerate(sequences)))
        assert isinstance(outcome, StepDone), outcome
        for sequence, row in zip(sequences, outcome.rows, strict=True):
            assert row.error is None
            sequence.fresh = False
            sequence.computed = min(len(sequence.tokens), sequence.computed + (chunk or len(sequence.tokens)))
            for sampled in row.samples:
                sequence.tokens.append(sampled.token)
                sequence.outputs.append(sampled)
        return list(outcome.rows)

    def generate(self, sequences: list[Sequence], count: int, chunk: int | None = None) -> list[list[Sampled]]:
        """`count` tokens of each, all in one batch while any lacks some."""
        while waiting := [each for each in sequences if len(each.outputs) < count]:
            self.step(waiting, chunk)
        return [each.outputs for each in sequences]

    def logits(self, tokens: Iterable[int], chunk: int, *, singles: int = 0) -> torch.Tensor:
        """float32 [tokens, vocabulary] at every position: `chunk` tokens a step, and the last `singles` one by one."""
        executor, sequence = self.device.executor, self.sequence(tokens)
        assert isinstance(executor, StepExecutor)
        runner, found = executor.runner, []
        while left := len(sequence.tokens) - sequence.computed:
            work = self.work(sequence, min(chunk, left - singles) if left > singles else 1)
            executor.pool.admit(work)
            hidden = runner.forward(build((work,), executor.pool, runner.cache, runner.group, runner.windows))
            found.append(runner.logits(hidden, list(range(len(hidden)))))
            sequence.computed, sequence.fresh = work.end, False
        return torch.cat(found)
