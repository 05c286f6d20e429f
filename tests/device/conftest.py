"""A tiny network with random weights, the embedded model, and hands to drive an executor with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from surefoot.config import EngineConfig
from surefoot.device.start import Device, open_device
from surefoot.types import RowDone, Sample, Sampled, SamplingParams, StepDone, StepFailed, StepPlan, Work

GREEDY = SamplingParams(temperature=0.0, logprobs=3)
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
    "eos_token_id": 2,
    "bos_token_id": 1,
    "torch_dtype": "float32",
}


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


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the configuration of a tiny network; its weights are drawn at random."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


@pytest.fixture(scope="session")
def open_tiny(tiny_model: Path) -> Callable[..., Driver]:
    """Open the tiny network with settings, and hands to drive it."""

    def open_it(**settings: object) -> Driver:
        config = {"model": str(tiny_model), "load_format": "dummy", "dtype": "float32", "memory": 400 << 20} | settings
        return Driver(open_device(EngineConfig(**config), progress=lambda what, part: None))  # type: ignore[arg-type]

    return open_it


@pytest.fixture(scope="session")
def tiny(open_tiny: Callable[..., Driver]) -> Driver:
    return open_tiny()


@pytest.fixture(scope="session")
def smollm2() -> Driver:
    """The embedded model in float32."""
    return Driver(open_device(EngineConfig(memory=2 << 30), progress=lambda what, part: None))
