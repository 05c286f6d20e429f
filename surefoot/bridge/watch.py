"""Tells a worker that hangs from one that is slow: by its silence, and by the processor time that it used meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

STALL_SECONDS = 10.0
"""How long a worker with requests may be silent before the server no longer counts as ready."""
STOPPED_SECONDS = 6.0
"""Silence without any use of a processor, after which a worker with requests counts as hanging: it is stopped, or waits
for something that never comes. A worker that a loaded machine starves still gets a little time."""
BUSY_SECONDS = 60.0
"""Processor time that one step may use at least, whatever steps took before: kernels may be compiled in it."""
BUSY_TIMES = 10
"""Times the processor time of the longest step so far, after which a step counts as endless."""
IDLE_SHARE = 0.005
"""Share of its time that a process uses which does nothing but live."""


class Usage(Protocol):
    def cpu_seconds(self) -> float:
        """Processor time of the worker so far; raises OSError once it is gone."""
        ...


class Watch:
    """Of one worker at a time; `clock` in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.verdict = ""
        """Why the worker was found to hang."""
        self._clock = clock
        self._heard = clock()
        self._used: float | None = None  # processor time at the first look since it was heard
        self._looks = 0
        self._longest = 0.0

    @property
    def interval(self) -> float:
        """Seconds between two looks."""
        return STOPPED_SECONDS / 6

    @property
    def silence(self) -> float:
        """Seconds since the worker was heard, or since the first request after a quiet time."""
        return self._clock() - self._heard

    def begin(self) -> None:
        """The first request after a quiet time: silence counts from here."""
        self._heard, self._used = self._clock(), None

    def heard(self, worker: Usage) -> None:
        """A message came."""
        if self._used is not None:
            with contextlib.suppress(OSError):
                self._longest = max(self._longest, worker.cpu_seconds() - self._used)
        self._heard, self._used, self.verdict = self._clock(), None, ""

    def hangs(self, worker: Usage) -> bool:
        """Whether a worker with requests hangs; looked at every `interval` seconds."""
        try:
            used = worker.cpu_seconds()
        except OSError:
            return False  # it is gone, which the end of its socket tells
        if self._used is None:
            self._used, self._looks = used, 0
            return False
        self._looks += 1  # looks, not the clock: a machine that slept for a while hangs nobody
        own, span = used - self._used, self._looks * self.interval
        if span >= STOPPED_SECONDS and own <= IDLE_SHARE * span:
            self.verdict = f"It was silent for {self.silence:.1f} s and used no processor: it is stopped or waits."
        elif own > max(BUSY_SECONDS, BUSY_TIMES * self._longest):
            self.verdict = f"A step has used {own:.0f} s of processor time and is not done."
        return bool(self.verdict)
