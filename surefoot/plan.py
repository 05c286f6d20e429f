"""Memory arithmetic: what fits where, from numbers alone. No device, no weights, no torch.

The budget is spent top down, and what is left is KV cache:

    budget = weights + activations of the worst step + logits of the worst step + reserve + KV blocks

The same formula for one step predicts, before every launch, what that step is going to allocate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from surefoot.config import GIB, MIB, EngineConfig, format_bytes
from surefoot.errors import ConfigError, DoesNotFit
from surefoot.spec import ModelSpec, tensor_shapes
from surefoot.types import Value

MIN_CONTEXT = 256
"""Tokens of one sequence without which serving is pointless."""
HEADROOM = 1 * GIB
"""Left to the neighbours by default."""
CPU_DEFAULT_BUDGET = 4 * GIB
QUERY_TILE = 64
"""Tokens of a prompt whose attention scores exist at one time, here and in `ops.attention`."""

_ITEM = {"float32": 4, "float16": 2, "bfloat16": 2}


class MachineMemory(Value, frozen=True):
    """What `device.memory.measure` found, in bytes. `limit` is the tightest bound on this process, if there is one."""

    total: int
    free: int
    limit: int | None = None
    name: str = ""
    """Of a card, as its driver calls it."""


class Overheads(Value, frozen=True, kw_only=True):
    """Bytes that a process takes of a device besides the tensors of its model."""

    context: int
    """The driver's own, with torch and its libraries loaded; it is outside of the budget."""
    workspaces: int
    """Of cuBLAS, 32 MiB for each handle and stream, and of split attention."""
    graphs: int
    """Captured steps."""
    reserve: int
    """Code that is loaded while serving, and what allocators round up."""


CARDS = {"H200": Overheads(context=520 * MIB, workspaces=64 * MIB, graphs=192 * MIB, reserve=320 * MIB)}
"""Cards by a part of their name, measured with GLM-4-9B; `context` varies by driver, ± 256 MiB."""
PROCESSOR = Overheads(context=0, workspaces=0, graphs=0, reserve=128 * MIB)


def overheads(device: str, name: str) -> Overheads:
    """Of a device; a card that was not measured is taken to be like the first that was."""
    if device == "cpu":
        return PROCESSOR
    return next((found for part, found in CARDS.items() if part in name), CARDS["H200"])


class StepCost(Value, frozen=True):
    """Bytes that one step allocates, as coefficients of its shape."""

    token: int
    """Per input token: the widest moment of a layer."""
    logit_row: int
    """Per row that is sampled: logits, and the copies that sampling makes of one row at a time are in `fixed`."""
    score: int
    """Per key position of the longest row: scores of one tile of queries, all heads."""
    gathered: int
    """Per key position whose keys and values are gathered at one time."""
    fixed: int
    """However small the step is."""

    def bytes(self, *, tokens: int, logit_rows: int, longest: int, gathered: int) -> int:
        """Of a step of `tokens` inputs with rows up to `longest` positions, `gathered` of them read at one time."""
        return (
            self.fixed
            + self.token * tokens
            + self.logit_row * logit_rows
            + self.score * longest
            + self.gathered * gathered
        )


class MemoryPlan(Value, frozen=True):
    """What was fitted. All sizes in bytes."""

    budget: int
    weights: int
    activations: int
    logits: int
    workspaces: int
    graphs: int
    reserve: int
    kv: int
    free: int
    block_bytes: int
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    dtype: str
    cost: StepCost
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [*self.rows(), ("budget", self.budget, f"of {format_bytes(self.free)} free")]
        lines = [f"{title(name):<12} {format_bytes(size):>11}  {about}" for name, size, about in rows if size]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def rows(self) -> Iterator[tuple[str, int, str]]:
        """(name, bytes, remark) of each thing that the budget is spent on."""
        yield "weights", self.weights, self.dtype
        yield "activations", self.activations, f"of the worst step, {self.max_num_batched_tokens:,} tokens"
        yield "logits", self.logits, f"of {self.max_num_seqs} rows"
        yield "workspaces", self.workspaces, "of libraries"
        yield "graphs", self.graphs, "captured steps"
        yield "reserve", self.reserve, "code, and what allocators round up"
        yield "kv_cache", self.kv, f"{self.num_blocks:,} blocks of {self.block_size} = {self.kv_tokens:,} tokens"

    @property
    def fixed(self) -> int:
        """What does not shrink while serving: everything but the KV cache."""
        return self.taken - self.kv

    @property
    def taken(self) -> int:
        """Bytes of all rows."""
        return sum(size for _, size, _ in self.rows())

    @property
    def kv_tokens(self) -> int:
        return self.num_blocks * self.block_size


def title(row: str) -> str:
    """A row's name as people read it."""
    return row.replace("_", " ").replace("kv", "KV")


def parameters(spec: ModelSpec) -> tuple[int, int]:
    """(numbers in matrices of all layers, experts included, and in the output projection; in all other tensors)."""
    output = spec.vocab_size * spec.hidden_size
    if spec.stored_parameters is not None:
        return spec.stored_parameters - (0 if spec.tie_word_embeddings else output), output
    sizes = {name: math.prod(shape) for name, shape in tensor_shapes(spec).items()}
    layers = sum(size for name, size in sizes.items() if name.endswith(("_proj.weight", ".gate.weight")))
    other = sum(sizes.values()) - layers - sizes.get("lm_head.weight", 0)
    return layers + output, other


def weight_bytes(spec: ModelSpec, *, device: str, dtype: str, quantization: str) -> int:
    """Weights as they lie in memory: on CPU a repacked output projection lies beside a tied embedding, and codes of 8
    bits beside float32; on a GPU codes are all there is of a linear layer, and some are unpacked at a time."""
    linear, other = parameters(spec)
    item = _ITEM[dtype]
    rotations = spec.max_position * spec.head_dim * 4
    if device != "cpu" and quantization != "none":
        return linear + other * item + rotations + 64 * MIB
    if spec.tie_word_embeddings and (device != "cpu" or dtype != "float32"):
        linear -= spec.vocab_size * spec.hidden_size
    return (linear + other) * item + (linear if quantization == "int8" else 0) + rotations


def step_cost(spec: ModelSpec, *, device: str, dtype: str) -> StepCost:
    """Coefficients of a step's memory, from the shapes of the largest tensors that live together."""
    item = _ITEM[dtype]
    heads = spec.num_heads + 2 * spec.num_kv_heads
    feed_forward = 2 * spec.hidden_size + 4 * spec.intermediate_size
    attention = 2 * spec.hidden_size + (heads + 3 * spec.num_heads) * spec.head_dim
    return StepCost(
        token=max(feed_forward, attention) * item + 256,
        logit_row=spec.vocab_size * 8,
        score=QUERY_TILE * spec.num_heads * item * 2 if device == "cpu" else 0,
        gathered=2 * spec.num_kv_heads * spec.head_dim * item if device == "cpu" else 0,
        fixed=(8 * MIB if device == "cpu" else 0) + spec.vocab_size * 48,
    )


def block_bytes(spec: ModelSpec, *, block_size: int, dtype: str) -> int:
    """One KV block over all layers."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * block_size * _ITEM[dtype]


def default_budget(machine: MachineMemory, *, device: str) -> int:
    """What is free now less a reserve; on CPU at most 4 GiB."""
    free = max(0, machine.free - HEADROOM)
    return min(free, CPU_DEFAULT_BUDGET) if device == "cpu" else free


def plan_memory(
    spec: ModelSpec,
    config: EngineConfig,
    machine: MachineMemory,
    *,
    device: str,
    dtype: str,
) -> MemoryPlan:
    """Fit the settings to the machine.

    Raises ConfigError for a context beyond the model's, and DoesNotFit, with the numbers, where weights and one
    sequence of 256 tokens have no room.
    """
    return _Fitting(spec, config, machine, device=device, dtype=dtype).fit()


class _Fitting:
    """One run of the arithmetic: settings shrink until they fit, and each that did leaves a note."""

    def __init__(
        self, spec: ModelSpec, config: EngineConfig, machine: MachineMemory, *, device: str, dtype: str
    ) -> None:
        cpu = device == "cpu"
        self.spec = spec
        self.config = config
        self.machine = machine
        self.device = device
        self.dtype = dtype
        self.block_size = config.block_size or (16 if cpu else 128)
        self.chunk = config.max_num_batched_tokens or (512 if cpu else 2048)
        self.seqs = config.max_num_seqs or (16 if cpu else 256)
        self.context = self._asked_context()
        self.asked = self._settings()
        self.budget = self._budget()
        self.cost = step_cost(spec, device=device, dtype=dtype)
        self.weights = weight_bytes(spec, device=device, dtype=dtype, quantization=config.quantization)
        self.block = block_bytes(spec, block_size=self.block_size, dtype=dtype)
        self.overheads = overheads(device, machine.name)

    def fit(self) -> MemoryPlan:
        floor = -(-min(MIN_CONTEXT, self.context) // self.block_size)
        while self._blocks() < floor and self._shrink():
            pass
        if self._blocks() < floor:
            raise DoesNotFit(self._refusal(floor))
        blocks = self._blocks()
        held = blocks * self.block_size
        self.context = min(self.context, held)
        needed = self.seqs * -(-self.context // self.block_size)
        return self._plan(min(blocks, needed))

    def _asked_context(self) -> int:
        asked, most = self.config.max_model_len, self.spec.max_position
        if asked is not None and asked > most:
            raise ConfigError(f"max_model_len: {asked} was asked for, but this model's positions end at {most}.")
        return asked or most

    def _budget(self) -> int:
        if self.config.memory is not None:
            return self.config.memory
        if self.config.gpu_memory_utilization is not None and self.device != "cpu":
            return int(self.machine.total * self.config.gpu_memory_utilization)
        return default_budget(self.machine, device=self.device)

    def _activations(self) -> int:
        longest = min(self.context, MIN_CONTEXT * 8) if self.device == "cpu" else self.context
        return self.cost.bytes(tokens=self.chunk, logit_rows=0, longest=longest, gathered=2 * self.context)

    def _logits(self) -> int:
        return self.cost.logit_row * self.seqs

    def _blocks(self) -> int:
        return max(0, (self.budget - self._fixed()) // self.block - 1)

    def _fixed(self) -> int:
        """Everything but the KV cache."""
        over = self.overheads
        return self.weights + self._activations() + self._logits() + over.workspaces + over.graphs + over.reserve

    def _shrink(self) -> bool:
        """Half a step, then half the sequences, then half the context; False where all are at their smallest.

        A smaller step costs speed, fewer sequences cost queueing, a shorter context refuses requests.
        """
        smallest = min(self.chunk, self.block_size)
        if self.chunk > smallest:
            self.chunk = max(smallest, self.chunk // 2)
        elif self.seqs > 1:
            self.seqs //= 2
        elif self.context > MIN_CONTEXT:
            self.context = max(MIN_CONTEXT, self.context // 2)
        else:
            return False
        return True

    def _notes(self) -> tuple[str, ...]:
        """What is not as it was asked for, or as the default has it."""
        got = self._settings()
        return tuple(
            f"{name} is {got[name]}, not {asked}, to fit into {format_bytes(self.budget)}"
            for name, asked in self.asked.items()
            if got[name] != asked
        )

    def _settings(self) -> dict[str, int]:
        return {
            "max_model_len": self.context,
            "max_num_batched_tokens": self.chunk,
            "max_num_seqs": self.seqs,
        }

    def _plan(self, blocks: int) -> MemoryPlan:
        return MemoryPlan(
            budget=self.budget,
            weights=self.weights,
            activations=self._activations(),
            logits=self._logits(),
            workspaces=self.overheads.workspaces,
            graphs=self.overheads.graphs,
            reserve=self.overheads.reserve,
            kv=(blocks + 1) * self.block,
            free=self.machine.free,
            block_bytes=self.block,
            num_blocks=blocks,
            block_size=self.block_size,
            max_model_len=self.context,
            max_num_batched_tokens=self.chunk,
            max_num_seqs=self.seqs,
            dtype=self.dtype if self.config.quantization == "none" else f"{self.dtype} + {self.config.quantization}",
            cost=self.cost,
            notes=self._notes(),
        )

    def _refusal(self, floor: int) -> str:
        need = self._fixed() + (floor + 1) * self.block
        over = self.overheads.workspaces + self.overheads.graphs + self.overheads.reserve
        return (
            f"The model does not fit: it needs {format_bytes(need)} (weights {format_bytes(self.weights)}, one step "
            f"{format_bytes(self._activations() + self._logits())}, reserve {format_bytes(over)}, KV cache of "
            f"one sequence of {floor * self.block_size} tokens {format_bytes((floor + 1) * self.block)}), and the "
            f"budget is {format_bytes(self.budget)} with {format_bytes(self.machine.free)} free. "
            f"Give it more with --memory, free some, or serve a smaller model."
        )
