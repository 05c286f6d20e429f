"""One sequence: its tokens, how many of them are computed, and the blocks that hold them.

tokens    [ prompt ............ | emitted ........ ]
computed  [ in the KV cache ....... )[ owed ......  )
                                      1 owed: decode; more: prefill (also after a preemption)
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field

from surefoot.core.blocks import Key
from surefoot.core.prefix import Hash, block_hash, root
from surefoot.types import Limits, Request, Sample, SamplingParams


def child_seed(seed: int, child: int) -> int:
    """Seed of child i of n: the request's own for the first, hash(seed, i) for the others (law 5)."""
    if child == 0:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + child.to_bytes(4, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and one continuation of it. Only the scheduler's transitions write it."""

    request: Request
    child: int
    arrival: int
    tokens: list[int]
    prompt_length: int
    seed: int
    forks: int
    """Children still to be split off when the prompt is computed."""
    longest: int
    """Tokens, prompt included, at which it ends."""
    stops: frozenset[int]
    """Tokens that end it, once min_tokens have been emitted."""
    computed: int = 0
    table: tuple[int, ...] = ()
    slot: int | None = None
    """Row of the executor's token pool while running; None while waiting."""
    loaded: bool = True
    """Whether the pool's row holds every token below `computed`."""
    epoch: int = 0
    served: int = 0
    """The last plan that computed tokens for it."""
    names: list[Hash] = field(default_factory=list)
    """Hashes of its full blocks, as far as they were needed; a prefix of the same tokens for good."""
    cached: int = 0
    """Prompt tokens that were found in the prefix cache when it was first admitted."""
    key: Key = field(init=False)
    params: SamplingParams = field(init=False)

    def __post_init__(self) -> None:
        self.key = (self.request.id, self.child)
        self.params = self.request.params

    @classmethod
    def of(cls, request: Request, arrival: int, limits: Limits) -> Sequence:
        """Child 0 of a new request."""
        prompt, params = array("i"), request.params
        prompt.frombytes(request.prompt)
        assert params.seed is not None, "a seed is drawn at admission"
        asked = limits.max_model_len if params.max_tokens is None else len(prompt) + params.max_tokens
        return cls(
            request,
            child=0,
            arrival=arrival,
            tokens=prompt.tolist(),
            prompt_length=len(prompt),
            seed=params.seed,
            forks=params.n - 1,
            longest=min(limits.max_model_len, asked),
            stops=frozenset(params.stop_token_ids).union(() if params.ignore_eos else limits.eos_token_ids),
        )

    @classmethod
    def rest_of(cls, request: Request, arrival: int, limits: Limits) -> list[Sequence]:
        """All that is to be computed of a request: its first child, or the children that it resumes.

        A resumed child has emitted tokens and computed none, just like one that was preempted.
        """
        first = cls.of(request, arrival, limits)
        if not request.resumed:
            return [first]
        children = []
        for resumed in request.resumed:
            emitted = array("i")
            emitted.frombytes(resumed.emitted)
            child = first.fork(resumed.child, 0)
            child.tokens[first.prompt_length :] = emitted.tolist()
            children.append(child)
        return children

    def fork(self, child: int, token: int) -> Sequence:
        """Child `child`, whose first token is `token`; it holds no blocks yet."""
        return Sequence(
            self.request,
            child=child,
            arrival=self.arrival,
            tokens=[*self.tokens[: self.prompt_length], token],
            prompt_length=self.prompt_length,
            seed=child_seed(self.seed, child),
            forks=0,
            longest=self.longest,
            stops=self.stops,
        )

    def names_of(self, blocks: int, size: int) -> list[Hash]:
        """Hashes of its first `blocks` blocks of `size` tokens, all of which it must have."""
        for index in range(len(self.names), blocks):
            parent = self.names[-1] if self.names else root(self.request.salt)
            self.names.append(block_hash(parent, self.tokens[index * size : (index + 1) * size]))
        return self.names[:blocks]

    @property
    def emitted(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def running(self) -> bool:
        return self.slot is not None

    def samples(self, pending: int) -> tuple[Sample, ...]:
        """The draws from the logits of the last token, `pending` of which are still in flight."""
        own = Sample(self.child, self.seed, len(self.tokens) - self.prompt_length + pending)
        if not self.forks or pending:
            return (own,)
        others = range(self.child + 1, self.child + 1 + self.forks)
        return (own, *(Sample(child, child_seed(self.seed, child), 0) for child in others))
