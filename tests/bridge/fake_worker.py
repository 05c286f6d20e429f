"""A worker process with a fake device: `python fake_worker.py [slow | poison] <fd> <fd> <parent>`.

"slow" never gets ready; "poison" is killed by the kernel whenever it is about to compute token 13.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from surefoot.bridge import wire
from surefoot.bridge.worker import Connection, main
from surefoot.config import EngineConfig
from surefoot.core.engine import Engine
from surefoot.testing import FakeExecutor
from surefoot.types import StepDone, StepFailed, StepPlan, Ticket
from tests.bridge.support import LIMITS, SPEC

POISON = 13


class SlowExecutor(FakeExecutor):
    """Takes its time, so that a test can act in between."""

    def launch(self, plan: StepPlan) -> Ticket:
        if MODE == "poison" and any(POISON in work.tokens for work in plan.works):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().launch(plan)

    def collect(self, ticket: Ticket) -> StepDone | StepFailed:
        time.sleep(0.01)
        return super().collect(ticket)


def build(config: EngineConfig, connection: Connection) -> Engine:
    connection.send(wire.Progress(stage="loading", fraction=0.0))
    if MODE == "slow":
        time.sleep(60)
    connection.send(wire.Ready(pid=1, limits=LIMITS, spec=SPEC, plan_text="a table"))
    return Engine(SlowExecutor(LIMITS), LIMITS)


if __name__ == "__main__":
    MODE = sys.argv[1] if len(sys.argv) == 5 else ""
    sys.argv = [sys.argv[0], *sys.argv[-3:]]
    sys.exit(main(build))
