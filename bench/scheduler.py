"""What deciding costs: microseconds of scheduling per step, with 256 rows decoding and nothing on the device.

.venv/bin/python bench/scheduler.py [rows] [context]
"""

from __future__ import annotations

import statistics
import sys
import time

from surefoot.core.engine import Engine
from surefoot.testing import request_of
from surefoot.types import Limits, RowDone, Sampled, StepDone, StepPlan, Ticket


class Instant:
    """An executor that takes no time and always draws token 1."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        self.spent = 0.0

    def launch(self, plan: StepPlan) -> Ticket:
        self.plans.append(plan)
        return Ticket(plan.id)

    def collect(self, ticket: Ticket) -> StepDone:
        plan = self.plans.pop(0)
        began = time.process_time()
        done = RowDone(samples=(Sampled(1),))
        outcome = StepDone(plan=plan.id, rows=tuple(done if work.samples else RowDone() for work in plan.works))
        self.spent += time.process_time() - began
        return outcome

    def free_memory(self) -> int:
        return 1 << 40


def main(rows: int, context: int) -> None:
    blocks = rows * (context + 400) // 16 + rows
    for depth in (1, 2):
        limits = Limits(
            max_model_len=context + 400, max_num_batched_tokens=8192, max_num_seqs=rows, block_size=16,
            num_blocks=blocks, eos_token_ids=(), depth=depth,
        )  # fmt: skip
        executor = Instant()
        engine = Engine(executor, limits)
        for id in range(rows):
            engine.add(request_of(id, [1] * context, max_tokens=380), 0.0)
        while engine.snapshot().tokens_emitted < rows * 5:
            engine.step(0.0)
        times = []
        for _ in range(300):
            executor.spent = 0.0
            began = time.process_time()
            engine.step(0.0)
            times.append((time.process_time() - began - executor.spent) * 1e6)
        print(
            f"depth {depth}: {rows} rows at {context} tokens: median {statistics.median(times):.0f} us, "
            f"p99 {sorted(times)[296]:.0f} us a step"
        )


if __name__ == "__main__":
    main(*(int(arg) for arg in sys.argv[1:]) if len(sys.argv) == 3 else (256, 1000))
