"""How many tokens a step may compute, learnt from what ran out of memory (law 7).

A failure halves the budget and is remembered together with the free memory at that moment. The budget grows again only
once free memory has grown by what was missing, or a back-off has passed that doubles with each failure: no oscillation.
"""

from __future__ import annotations

import math

FIRST_BACKOFF, LAST_BACKOFF = 1.0, 60.0


class TokenBudget:
    """`tokens` is the size of the next step; seconds come from the caller's clock, bytes from the executor."""

    def __init__(self, limit: int, floor: int) -> None:
        self._limit = limit
        self._floor = min(floor, limit)
        self.forget()

    def forget(self) -> None:
        """Back to the full size: what failed is gone."""
        self.tokens = self._limit
        self._backoff = FIRST_BACKOFF
        self._retry_at = 0.0
        self._enough: float = math.inf
        self._proving = False

    def failed(self, size: int, *, now: float, free: int | None, needed: int | None) -> None:
        """A step of `size` tokens ran out of memory, `needed` bytes being asked for with `free` there."""
        self.tokens = min(self.tokens, max(self._floor, size // 2))
        self._retry_at = now + self._backoff
        self._backoff = min(LAST_BACKOFF, 2 * self._backoff)
        self._enough = math.inf if free is None or needed is None else free + needed
        self._proving = False

    def committed(self, size: int, *, now: float) -> None:
        """A step of `size` tokens went well; one that used what the budget last grew by lets it grow on at once."""
        if self._proving and 2 * size > self.tokens:
            self._backoff = FIRST_BACKOFF
            self._retry_at = now
            self._proving = False

    def grow(self, *, now: float, free: int) -> None:
        """Double the budget where the memory of the last failure allows it."""
        if self.tokens < self._limit and (now >= self._retry_at or free >= self._enough):
            self.tokens = min(self._limit, 2 * self.tokens)
            self._retry_at = now + self._backoff
            self._enough = math.inf
            self._proving = True
