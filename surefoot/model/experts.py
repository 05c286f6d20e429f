"""Mixture of experts: a router asks a few of many small networks for each row (https://arxiv.org/abs/2101.03961)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.model.layers import FeedForward
from surefoot.ops.linear import Linear


@dataclass(frozen=True)
class MixtureOfExperts:
    """Each row's sum of its experts' answers, weighted by how sure the router is of each; [n, hidden] → [n, hidden].

    Rows go to an expert together. A row's own experts add up in the order of their numbers, so that its sum does not
    depend on the rows beside it.
    """

    router: Linear
    experts: Sequence[FeedForward]
    per_token: int
    normalize: bool
    """Shares of the chosen experts are divided by their sum."""

    def __call__(self, x: Tensor) -> Tensor:
        shares, chosen = self._route(x)
        out = torch.zeros_like(x)
        for number in sorted(set(chosen.flatten().tolist())):
            rows, rank = (chosen == number).nonzero(as_tuple=True)
            out[rows] += self.experts[number](x[rows]) * shares[rows, rank, None]
        return out

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The share and the number of each row's experts, [n, per_token]; shares are taken in float32."""
        shares, chosen = self.router(x).float().softmax(-1).topk(self.per_token)
        if self.normalize:
            shares /= shares.sum(-1, keepdim=True)
        return shares.to(x.dtype), chosen
