"""The values that cross boundaries: frozen, torch-free, safe to share by reference.

`core` decides with them, `device` acts on them, `bridge` sends some of them over the wire. Nothing here has behaviour
beyond construction, so that deciding and doing can be read, and tested, apart.

A sequence is a list of tokens. `computed` of them have keys and values in the KV cache; a step computes some more:

    positions   0 ............ start ............ start+len(tokens)
                [ in the cache )[ given to this step )
                                                     ^ the logits of the last one are sampled, if the step reaches
                                                       the end of what is known of the sequence
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import ClassVar, Protocol

import msgspec
from msgspec.structs import replace

PENDING = -1
"""An input token that a plan still in flight is sampling: the executor reads it from its own token pool."""


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """Base of frozen values: immutable, compared by content, encodable. Subclasses say `frozen` and `kw_only` again."""


class Grammar(Value, frozen=True, kw_only=True):
    """What an output may be; made and compiled by `surefoot.grammar`."""

    source: str
    """In the grammar engine's own notation."""
    field: str
    """The field of the request that asked for it, for errors."""


class Vocabulary(Value, frozen=True, kw_only=True):
    """What token ids stand for: all that is known of text below the bridge, for grammars alone."""

    tokens: tuple[bytes, ...]
    specials: tuple[int, ...]
    """Ids that a grammar meets by name only, never by their text."""


class SamplingParams(Value, frozen=True, kw_only=True):
    """How to draw tokens. Names and defaults are vLLM's; `surefoot.sampling.validate` refuses what is out of range.

    `stop` holds strings and is matched above the bridge, where text lives; `bad_words` become `bad_token_ids` there.
    Everything else acts on token ids below it.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that an output may not contain."""
    grammar: Grammar | None = None

    @property
    def greedy(self) -> bool:
        """True where the likeliest token is taken and no noise is drawn (vLLM's threshold)."""
        return self.temperature < 1e-5


class Resumed(Value, frozen=True, kw_only=True):
    """A child of a request that goes on after its worker died: `emitted` are its token ids so far, as in `Request`."""

    child: int
    emitted: bytes


class Request(Value, frozen=True, kw_only=True):
    """One admitted request, as it crosses the bridge. `params.seed` and `params.max_tokens` are always set here."""

    id: int
    prompt: bytes
    """Token ids, int32, little endian."""
    params: SamplingParams
    priority: int = 0
    """Lower is served first, as in vLLM; arrival breaks ties."""
    salt: str = ""
    """Only requests of the same salt share cached prefixes."""
    resumed: tuple[Resumed, ...] = ()
    """What is left of it, if it began on a worker that died: each child that goes on; none for a new request."""


class StepTime(Value, frozen=True, kw_only=True):
    """Seconds that a step takes, as measured at start: what chunks are sized by while somebody waits for a token."""

    fixed: float
    token: float
    """Per token: linear layers and everything else that does not look back."""
    pair: float
    """Per token and token that it looks back at: attention."""

    def tokens_in(self, seconds: float, start: int) -> int:
        """How many tokens from position `start` on take `seconds`: the root of token·n + pair·n·(start + n/2)."""
        linear = self.token + self.pair * start
        if seconds <= 0:
            return 0
        if math.isinf(seconds):
            return 1 << 62
        if self.pair <= 0:
            return int(seconds / linear)
        return int((math.sqrt(linear * linear + 2 * self.pair * seconds) - linear) / self.pair)

    def seconds(self, tokens: int, start: int) -> float:
        """What `tokens` tokens from position `start` on add to a step."""
        return self.token * tokens + self.pair * tokens * (start + tokens / 2)


class Limits(Value, frozen=True, kw_only=True):
    """What was fitted to the device at start, and what core may plan with."""

    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    num_blocks: int
    """KV blocks that core may hand out: ids 0 … num_blocks-1. The sink block of padding rows is not among them."""
    eos_token_ids: tuple[int, ...]
    depth: int = 1
    """Plans in flight at once: 1 on CPU, 2 on a GPU."""
    prefix_caching: bool = True
    step_time: StepTime | None = None
    """None: steps are bounded by tokens alone."""
    max_step_seconds: float = 0.1
    """How long a step may take while another row is owed a token."""


# ---- one step: core → device ----------------------------------------------------------------------------------------


class Sample(msgspec.Struct, frozen=True):
    """One draw from a row's last logits: noise is f(seed, index), index being the position among output tokens."""

    child: int
    seed: int
    index: int


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What one sequence does in one step."""

    request: int
    child: int
    epoch: int
    slot: int
    """Row of the executor's token pool, held by this sequence while it runs."""
    start: int
    tokens: tuple[int, ...]
    """Inputs for positions start … start+len(tokens); may end in PENDING."""
    table: tuple[int, ...]
    """KV block of every position below start+len(tokens), block i holding positions i*block_size …"""
    known: tuple[int, ...] | None
    """Tokens below `start`, given where the slot's pool does not hold them yet."""
    samples: tuple[Sample, ...]
    params: SamplingParams
    decoding: bool
    """True for a proven shape: one token, by a sequence that has emitted before."""

    @property
    def key(self) -> tuple[int, int]:
        return (self.request, self.child)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One forward pass over the rows of `works`, after the block copies of `copies` (source, destination)."""

    id: int
    works: tuple[Work, ...]
    copies: tuple[tuple[int, int], ...] = ()
    control: bool = False
    """A control step: one padding row on the sink block, same kernels, no sequence. `works` is empty."""

    @property
    def tokens(self) -> int:
        return sum(len(work.tokens) for work in self.works)


# ---- one step: device → core ----------------------------------------------------------------------------------------


class Sampled(msgspec.Struct, frozen=True, array_like=True):
    """One drawn token. Log-probabilities are the raw model's: before penalties, bias and temperature."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class RowDone(msgspec.Struct, frozen=True):
    """Outcome of one row: a token per Sample, or the reason why this row alone is no good (law 11, ROW)."""

    samples: tuple[Sampled, ...] = ()
    error: str | None = None


class StepDone(msgspec.Struct, frozen=True, kw_only=True):
    """A step that ran; `rows` follows the order of the plan's `works`."""

    plan: int
    rows: tuple[RowDone, ...]
    seconds: float = 0.0


class FailureKind(enum.Enum):
    """Law 11: what a step's failure says about the device."""

    OOM = "oom"
    FAULT = "fault"
    LOST = "lost"


class StepFailed(msgspec.Struct, frozen=True, kw_only=True):
    """A step that did not run. The device was probed afterwards: LOST means that it is not usable any more."""

    plan: int
    kind: FailureKind
    reason: str
    needed: int | None = None
    """Bytes that the failed allocation asked for, where the error tells."""
    free: int | None = None
    """Bytes free after the failure, once the step's tensors are gone."""
    cause: str = "allocation"
    """Of an OOM: predicted (not tried), allocation (one was refused), library (something failed in its own words)."""


class Ticket(msgspec.Struct, frozen=True):
    """A launched plan; hand it to `collect` once."""

    plan: int


class Executor(Protocol):
    """The device's side of a step. Calls are made in order: every launched plan is collected, oldest first."""

    def launch(self, plan: StepPlan) -> Ticket:
        """Start a plan. Never raises for a step that fails: the failure is what `collect` returns."""
        ...

    def collect(self, ticket: Ticket) -> StepDone | StepFailed:
        """Wait for a launched plan and return its outcome."""
        ...

    def free_memory(self) -> int:
        """Bytes that a step could still allocate; read every step, so it must be cheap."""
        ...

    def move(self, pairs: Sequence[tuple[int, int]]) -> str | None:
        """Copy KV blocks (from, to), none of which is both; with nothing in flight. Returns None, or why it failed."""
        ...

    def hold(self, blocks: int) -> str | None:
        """Keep memory for the first `blocks` KV blocks and the sink, and give the rest back; with nothing in flight.

        Returns None, or why there is not enough: then it holds what it held before.
        """
        ...

    def learn(self, vocabulary: Vocabulary) -> None:
        """What tokens stand for; told before the first request with a grammar comes."""
        ...


# ---- events: core → the API process ---------------------------------------------------------------------------------


class Emitted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One output token of one child. `finish` is set on the last: "stop" or "length".

    `stop_token` is the id that ended the child (not part of the shown text), `index` the position among its outputs.
    """

    request: int
    child: int
    index: int
    sampled: Sampled
    finish: str | None = None
    stop_token: int | None = None
    cached: int = 0
    """Prompt tokens that the prefix cache spared; the same in every event of a child."""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A request that ended in an error; none of its children emits again. `kind` names a class of `surefoot.errors`."""

    request: int
    kind: str
    message: str


Event = Emitted | Failed


class Snapshot(Value, frozen=True, kw_only=True):
    """Counts for metrics and health: what the scheduler looked like after a step. Counters only grow."""

    GAUGES: ClassVar[frozenset[str]] = frozenset(
        (
            "running", "waiting", "suspects", "blocks_total", "blocks_used", "blocks_cached", "blocks_idle",
            "block_size", "token_budget",
        )
    )  # fmt: skip
    """What goes up and down; every other field is a counter."""

    steps: int = 0
    running: int = 0
    waiting: int = 0
    suspects: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    block_size: int = 0
    token_budget: int = 0
    tokens_computed: int = 0
    tokens_emitted: int = 0
    preemptions: int = 0
    steps_oom: int = 0
    oom_predicted: int = 0
    """Of steps_oom those that were not even tried, and those where something failed that did not say why."""
    oom_library: int = 0
    steps_fault: int = 0
    control_steps: int = 0
    rows_failed: int = 0
    requests_failed: int = 0
    leaks_repaired: int = 0
    retries: int = 0
    """Plans that were rolled back, and whose rows were tried again."""
    blocks_idle: int = 0
    """KV blocks whose memory was given back for want of work; they come back with the next request."""
    shrinks: int = 0
    """Times that the KV cache gave memory back while serving, and the blocks in use that were moved for that."""
    blocks_moved: int = 0
    blocks_cached: int = 0
    prefix_queries: int = 0
    """Prompt tokens that were looked up in the prefix cache, and how many were found there."""
    prefix_hits: int = 0

    def after(self, earlier: Snapshot) -> Snapshot:
        """This one with the counters of an earlier engine added."""
        counters = {field for field in self.__struct_fields__ if field not in self.GAUGES}
        return replace(self, **{field: getattr(self, field) + getattr(earlier, field) for field in counters})
