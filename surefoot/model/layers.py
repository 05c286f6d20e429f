"""What networks share: how a layer attends, the stream that layers add to, and how parameters are gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from surefoot.errors import CheckpointError
from surefoot.ops.activation import gate
from surefoot.ops.linear import Linear
from surefoot.ops.norm_rope import add_rms_norm


@dataclass(frozen=True)
class Attention:
    """How one layer attends, besides its projections."""

    turns: Tensor | None
    """Unit complex numbers [max_position, rotary_dim/2], complex64 (`ops.norm_rope.rotations`); None: none turn."""
    q_norm: Tensor | None
    k_norm: Tensor | None
    """[head_dim]: each head of queries and keys is normed before it turns."""
    eps: float
    scale: float
    """What scores are multiplied with."""
    window: int | None
    """Tokens that a token sees, itself included; None: all before it."""
    softcap: float | None
    """scores → cap · tanh(scores / cap)."""


Attend = Callable[[int, Tensor, Attention], Tensor]
"""Attention of one layer: (layer, qkv [n, heads + 2·kv_heads, head_dim], how) → [n, heads·head_dim].

It norms and turns queries and keys, stores keys and values of these tokens, and looks at all that the cache holds of
their sequences. How that is paged and batched is not the network's business.
"""


class Network(Protocol):
    """A family's page, with its weights."""

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, keep: Tensor | None = None) -> Tensor:
        """Ids and positions [n] → hidden rows [n, hidden] after the last norm, or [k, hidden] of the tokens `keep` [k].

        Of a prompt's tokens most are there for their keys and values alone, which the last layer has stored before it
        attends: what comes after is computed for the kept ones only.
        """
        ...

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Hidden rows [rows, hidden] → [rows, vocabulary], into `out` if given."""
        ...


@dataclass(frozen=True)
class FeedForward:
    """`down( act(gate) · up )` of [n, hidden] (https://arxiv.org/abs/2002.05202)."""

    gate_up: Linear
    down: Linear
    activation: str

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(gate(self.gate_up(x), self.activation))


class Stream:
    """Hidden rows that each half of a layer reads, normed, and adds to.

    An addition waits for the norm that follows it, so that on a GPU both are one kernel.
    """

    def __init__(self, hidden: Tensor, eps: float) -> None:
        self._hidden = hidden
        self._eps = eps
        self._change: Tensor | None = None
        self._change_norm: Tensor | None = None

    def add(self, change: Tensor, norm: Tensor | None = None) -> None:
        """Add `change` [n, hidden], normed first where the family norms what a half of a layer puts out."""
        self._change, self._change_norm = change, norm

    def keep(self, rows: Tensor) -> None:
        """Go on with the rows `rows` [k] alone; nothing may be waiting to be added."""
        self._hidden = self._hidden.index_select(0, rows)

    def normed(self, weight: Tensor) -> Tensor:
        """The norm of the sum so far, times `weight` [hidden]."""
        change, norm = self._change, self._change_norm
        self._change = self._change_norm = None
        return add_rms_norm(self._hidden, change, weight, self._eps, change_weight=norm)


class Part(NamedTuple):
    """One parameter of ours, made of tensors of the checkpoint as soon as all of them are there."""

    name: str
    sources: tuple[str, ...]
    make: Callable[..., object]


def assemble(parts: Iterable[Part], tensors: Iterable[tuple[str, Tensor]]) -> dict[str, object]:
    """Feed a stream of tensors into the parts; each part keeps its sources only until it is made.

    Raises CheckpointError naming a tensor that no part takes, or those that never came.
    """
    parts = list(parts)
    taker = {source: part for part in parts for source in part.sources}
    waiting: dict[str, dict[str, Tensor]] = {part.name: {} for part in parts}
    made: dict[str, object] = {}
    for name, tensor in tensors:
        if name not in taker:
            raise CheckpointError(f"The checkpoint holds a tensor that this architecture does not have: {name}.")
        part = taker[name]
        waiting[part.name][name] = tensor
        if len(waiting[part.name]) == len(part.sources):
            held = waiting.pop(part.name)
            made[part.name] = part.make(*(held[source] for source in part.sources))
    _check_complete(waiting, taker)
    return made


def _check_complete(waiting: Mapping[str, Mapping[str, Tensor]], taker: Mapping[str, Part]) -> None:
    missing = [name for name, part in taker.items() if part.name in waiting and name not in waiting[part.name]]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(f"The checkpoint lacks {', '.join(missing[:3])}{more}; it is incomplete.")


def stack(*weights: Tensor) -> Tensor:
    """Projections of one input, as one: rows below each other."""
    return torch.cat(weights)
