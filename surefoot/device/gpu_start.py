"""Getting a GPU ready: the cache, every kernel compiled, the largest step run once, graphs captured.

Nothing is compiled, and nothing new asked of the driver, inside a served request: what steps need is taken here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from surefoot.device import memory
from surefoot.device.gpu_backends import choose
from surefoot.device.gpu_cache import GpuCache
from surefoot.device.gpu_executor import GpuExecutor
from surefoot.device.gpu_inputs import Shape
from surefoot.device.gpu_runner import PREFILL_ROWS, GpuRunner
from surefoot.faults import Faults
from surefoot.model.layers import Network
from surefoot.plan import MemoryPlan
from surefoot.spec import ModelSpec
from surefoot.types import Limits, Sample, SamplingParams, StepDone, StepPlan, StepTime, Work

Progress = Callable[[str, float], None]
log = logging.getLogger(__name__)

DECODE_SIZES = (1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 513, 32))
"""Decode rows that graphs are captured for; a step of another size takes the next larger one."""
MIXED_TOKENS = (128, 256, 512, 1024, 2048)
MIXED_DECODES = (0, 32, 256)
"""Tokens, and decode rows among them, of steps with prompts that graphs are captured for."""


def start_gpu(
    spec: ModelSpec,
    network: Network,
    plan: MemoryPlan,
    limits: Limits,
    faults: Faults,
    device: torch.device,
    progress: Progress,
) -> tuple[GpuExecutor, StepTime]:
    """An executor that is warm, and how long its steps take. Raises what the largest step raised."""
    began = time.perf_counter()
    dtype = getattr(torch, plan.dtype.split()[0])
    cache = GpuCache(spec, num_blocks=plan.num_blocks, block_size=plan.block_size, dtype=dtype, device=device)
    backend = choose(spec, cache)
    runner = GpuRunner(spec, network, cache, limits, backend)
    executor = GpuExecutor(runner, limits, Faults())
    for step in warm_plans(limits, cache.sink):
        log.debug("warm-up: %d rows, %d tokens, %.2f s", len(step.works), step.tokens, _run(executor, step))
    log.info("warm after %.1f s", time.perf_counter() - began)
    _capture(executor, list(graph_shapes(limits, mixed=backend.graphs)), progress)
    step_time = measure_steps(executor, limits, cache.sink)
    cache.zero([cache.sink])
    torch.cuda.synchronize()
    executor.faults = faults
    log.info("ready to serve after %.1f s", time.perf_counter() - began)
    return executor, step_time


def graph_shapes(limits: Limits, *, mixed: bool) -> Iterator[Shape]:
    """What to capture, largest first, so that the graphs share the memory of the largest."""
    most, rows = limits.max_num_batched_tokens, limits.max_num_seqs
    for tokens in sorted({min(size, most) for size in MIXED_TOKENS} | {most}, reverse=True) if mixed else ():
        for decodes in sorted({min(count, rows) for count in MIXED_DECODES}, reverse=True):
            if decodes < tokens <= MIXED_TOKENS[-1]:
                both = decodes + PREFILL_ROWS
                yield Shape(tokens=tokens, decode_rows=decodes, rows=both, samples=both, padded=True)
    for size in sorted({min(size, rows) for size in DECODE_SIZES}, reverse=True):
        yield Shape(tokens=size, decode_rows=size, rows=size, samples=size, padded=True)


def _capture(executor: GpuExecutor, shapes: list[Shape], progress: Progress) -> None:
    """Capture as many graphs as memory allows: what has none runs eagerly."""
    for done, shape in enumerate(shapes):
        progress("capturing graphs", done / len(shapes))
        captured = memory.guard(partial(executor.capture, shape))
        if isinstance(captured, memory.Failure):
            log.warning("%d of %d graphs captured, the rest runs eagerly: %s", done, len(shapes), captured.reason)
            return


def warm_plans(limits: Limits, sink: int) -> Iterator[StepPlan]:
    """A control step; the largest prompt chunk at the longest context; all rows decoding, drawn in every way."""
    yield StepPlan(id=0, works=(), control=True)
    most = min(limits.max_num_batched_tokens, limits.max_model_len - 1)
    for tokens, end in ((most, limits.max_model_len - 1), (most, most), (min(most, 5), min(most, 5))):
        yield StepPlan(id=0, works=(_work(limits, sink, 0, end - tokens, tokens, SamplingParams()),))
    hot = SamplingParams(temperature=1.0)
    for params in (SamplingParams(temperature=0.0), hot, SamplingParams(top_p=0.9, top_k=50, logprobs=5)):
        rows = tuple(_work(limits, sink, row, 5, 1, params) for row in range(limits.max_num_seqs))
        yield StepPlan(id=0, works=rows)
    mixed = [_work(limits, sink, row, 5, 1, hot) for row in range(min(2, limits.max_num_seqs - 1))]
    if mixed and most > 64:
        yield StepPlan(id=0, works=(*mixed, _work(limits, sink, len(mixed), 0, most // 2, hot)))


def _work(limits: Limits, sink: int, slot: int, start: int, tokens: int, params: SamplingParams) -> Work:
    blocks = -(-(start + tokens) // limits.block_size)
    return Work(
        request=-1,
        child=slot,
        epoch=0,
        slot=slot,
        start=start,
        tokens=tuple(at * 7919 % 1000 for at in range(tokens)),  # rows that are alike would run faster than real ones
        table=(sink,) * blocks,
        known=None,
        samples=(Sample(child=slot, seed=0, index=0),),
        params=params,
        decoding=tokens == 1,
    )


def measure_steps(executor: GpuExecutor, limits: Limits, sink: int) -> StepTime:
    """Fit seconds to tokens and to what they look back at: a small step, a large one, and a large one far behind."""
    most = min(limits.max_num_batched_tokens, limits.max_model_len - 1)
    small, far = min(16, most), limits.max_model_len - 1 - most

    def seconds(start: int, tokens: int) -> float:
        plan = StepPlan(id=0, works=(_work(limits, sink, 0, start, tokens, SamplingParams(temperature=0.0)),))
        return min(_run(executor, plan) for _ in range(2))

    fixed, near, back = seconds(0, small), seconds(0, most), seconds(far, most)
    pair = max(0.0, back - near) / (most * far) if far else 0.0
    token = max(1e-9, (near - fixed - pair * most * most / 2) / most)
    log.info(
        "a step takes %.1f ms, %.1f us a token, %.3f ns a token looked back at", fixed * 1e3, token * 1e6, pair * 1e9
    )
    return StepTime(fixed=fixed, token=token, pair=pair)


def _run(executor: GpuExecutor, plan: StepPlan) -> float:
    """Run a plan and return its seconds."""
    outcome = executor.collect(executor.launch(plan))
    if not isinstance(outcome, StepDone):
        raise RuntimeError(f"A step of {plan.tokens} tokens failed while warming up: {outcome.reason}")
    return outcome.seconds
