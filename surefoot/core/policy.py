"""Who goes first: lower priority numbers, then earlier arrivals, then lower children."""

from __future__ import annotations

from surefoot.core.sequence import Sequence


def order(sequence: Sequence) -> tuple[int, int, int]:
    """Sort key of service; the last in this order is the first to be preempted."""
    return (sequence.request.priority, sequence.arrival, sequence.child)
