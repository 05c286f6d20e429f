"""A worker process with a fake device: `python fake_worker.py [slow] <fd> <parent>`. "slow" never gets ready."""

from __future__ import annotations

import sys
import time

from surefoot.bridge import wire
from surefoot.bridge.worker import Connection, main
from surefoot.config import EngineConfig
from surefoot.core.engine import Engine
from surefoot.testing import FakeExecutor
from surefoot.types import StepDone, StepFailed, Ticket
from tests.bridge.support import LIMITS, SPEC


class SlowExecutor(FakeExecutor):
    """Takes its time, so that a test can act in between."""

    def collect(self, ticket: Ticket) -> StepDone | StepFailed:
        time.sleep(0.01)
        return super().collect(ticket)


def build(config: EngineConfig, connection: Connection) -> Engine:
    connection.send(wire.Progress(stage="loading", fraction=0.0))
    if SLOW:
        time.sleep(60)
    connection.send(wire.Ready(pid=1, limits=LIMITS, spec=SPEC, plan_text="a table"))
    return Engine(SlowExecutor(LIMITS), LIMITS)


if __name__ == "__main__":
    SLOW = sys.argv[1] == "slow"
    sys.argv = [sys.argv[0], *sys.argv[-2:]]
    sys.exit(main(build))
