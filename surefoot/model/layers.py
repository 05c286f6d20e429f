"""What the pages of the families share: how parameters are gathered out of a checkpoint, and what a network is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from surefoot.errors import CheckpointError

Attend = Callable[[int, Tensor], Tensor]
"""Attention of one layer: (layer, qkv [n, heads + 2·kv_heads, head_dim] after rotation) → [n, heads·head_dim].

It stores the keys and values of these tokens and looks at all that the cache holds of their sequences. How that is
paged and batched is not the network's business.
"""


class Network(Protocol):
    """A family's page, with its weights."""

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Ids and positions [n] (int64) → hidden rows [n, hidden] after the last norm."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden rows [rows, hidden] → float32 [rows, vocabulary]."""
        ...


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
