"""Check and time every Triton kernel on the GPU that is there, at the shapes of GLM-4-9B in bfloat16.

    python bench/kernels.py [--only decode,linear] [--json FILE]

Each kernel is checked against float64 on random inputs, its output poisoned first; one that is wrong is named and the
exit status is 1. Times are medians of CUDA-graph replays over inputs that together exceed the L2 cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "ops"))

import reference

from surefoot.architecture import Rope
from surefoot.ops import attention_triton as attention
from surefoot.ops import linear_triton, sample
from surefoot.ops import sample_triton as sampling
from surefoot.ops.activation_triton import silu_and_mul
from surefoot.ops.norm_rope import rotate_, rotations
from surefoot.ops.norm_rope_triton import add_rms_norm, rope_and_store, sandwich_rms_norm

HIDDEN, HEADS, KV_HEADS, DIM, FFN, VOCABULARY, TOKENS = 4096, 32, 2, 128, 13696, 151552, 151343
LAYER_LINEARS = {"qkv": (4608, 4096), "o": (4096, 4096), "gate_up": (27392, 4096), "down": (4096, 13696)}
BF16 = torch.bfloat16
DEVICE = torch.device("cuda")
ROWS = (1, 32, 256, 8192)
SCALE = DIM**-0.5
EPS = 1e-5
FLUSH = 192 << 20
"""Bytes of inputs that are rotated: several times the L2 cache."""


@dataclass
class Report:
    """Lines as they come, and what was wrong."""

    rows: list[dict[str, object]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def check(self, name: str, error: float, limit: float = 1e-2) -> None:
        """Note a relative error; NaN is wrong."""
        good = error <= limit
        self.rows.append({"kernel": name, "error": error})
        print(f"{'ok   ' if good else 'WRONG'} {name:44s} error {error:.1e}", flush=True)
        if not good:
            self.wrong.append(name)

    def time(self, name: str, us: float, *, moved: float = 0, flop: float = 0) -> None:
        """Note a time, with the bandwidth and rate that it amounts to."""
        self.rows.append({"kernel": name, "us": us, "tb_s": moved / us / 1e6, "tflop_s": flop / us / 1e6})
        rates = (f"{moved / us / 1e6:6.2f} TB/s" if moved else "") + (f"{flop / us / 1e6:7.0f} TFLOP/s" if flop else "")
        print(f"      {name:44s} {us:9.2f} us {rates}", flush=True)


def random(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def poisoned(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.full(shape, torch.nan, device=DEVICE, dtype=dtype)


def copies(size: int) -> int:
    """Input sets of `size` bytes that overflow the cache."""
    return max(2, min(64, -(-FLUSH // max(size, 1))))


def replay(calls: Sequence[Callable[[], object]], *, rounds: int = 0) -> float:
    """Median microseconds of one call, replayed from a graph that holds `rounds` of all `calls`."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    rounds = rounds or max(1, 24 // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / (rounds * len(calls)))
    return statistics.median(times[2:])


def launch_cost(call: Callable[[], object]) -> float:
    """Microseconds of Python for one eager launch, the device kept from being the limit by little work."""
    call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(200):
        call()
    cost = (time.perf_counter() - begin) / 200 * 1e6
    torch.cuda.synchronize()
    return cost


def small_kernels(report: Report) -> None:
    """Norms, gate, rotation and cache write."""
    weight, inner = random(HIDDEN), random(HIDDEN)
    for rows in (1, 5):
        hidden, delta, out = random(rows, HIDDEN), random(rows, HIDDEN), poisoned(rows, HIDDEN)
        total = hidden + delta
        add_rms_norm(hidden, delta, weight, EPS, out)
        report.check(f"add_rms_norm {rows}", reference.relative(out, reference.rms(total, weight, EPS)))
        expected = hidden.double() + reference.rms(delta, inner, EPS)
        sandwich_rms_norm(hidden, delta, inner, weight, EPS, out)
        report.check(f"sandwich_rms_norm {rows}", reference.relative(out, reference.rms(expected, weight, EPS)))
        gate_up, gated = random(rows, 2 * FFN), poisoned(rows, FFN)
        silu_and_mul(gate_up, gated)
        report.check(f"silu_and_mul {rows}", reference.relative(gated, reference.swiglu(gate_up)))
    for rows in ROWS:
        sets = [(random(rows, HIDDEN), random(rows, HIDDEN)) for _ in range(copies(rows * HIDDEN * 4))]
        calls = [partial(add_rms_norm, hidden, delta, weight, EPS, delta) for hidden, delta in sets]
        report.time(f"add_rms_norm {rows}", replay(calls), moved=rows * HIDDEN * 8)
        gated = poisoned(rows, FFN)
        calls = [partial(silu_and_mul, random(rows, 2 * FFN), gated) for _ in range(copies(rows * FFN * 4))]
        report.time(f"silu_and_mul {rows}", replay(calls), moved=rows * FFN * 6)
    hidden = random(1, HIDDEN)
    report.time("eager launch", launch_cost(partial(add_rms_norm, hidden, None, weight, EPS, torch.empty_like(hidden))))


def rope(report: Report) -> None:
    """Interleaved pairs over half of head_dim, as GLM has it."""
    turns = rotations(Rope(theta=10_000.0, dim=64, interleaved=True, scaling=None), 4096, DEVICE)
    table = torch.view_as_real(turns)
    for rows in ROWS:
        kv = random(-(-rows // 128) + 1, 4, 2, 128, KV_HEADS, DIM)[:, 1]
        slots = torch.randperm(kv.shape[0] * 128, device=DEVICE)[:rows]
        positions = torch.randint(0, 4096, (rows,), device=DEVICE)
        qkv = random(rows, HEADS + 2 * KV_HEADS, DIM)
        expected = qkv.to(torch.float32, copy=True)
        turned = expected[:, : HEADS + KV_HEADS, :64].contiguous()
        rotate_(turned, turns[positions])
        expected[:, : HEADS + KV_HEADS, :64] = turned

        call = partial(rope_and_store, qkv, table, positions, kv, slots, heads=HEADS)
        call()
        stored = kv[slots // 128, :, slots % 128].flatten(1, 2)
        result = torch.cat([qkv[:, :HEADS], stored], 1)
        report.check(f"rope_and_store {rows}", reference.relative(result, expected))
        report.time(f"rope_and_store {rows}", replay([call]), moved=qkv.nbytes * 2)


def decode_case(
    lengths: Sequence[int], spread: int
) -> tuple[Callable[[], object], Callable[[], object], Callable[[], float]]:
    """A call of plan, a call of attention, and its error on the last row."""
    kv, table = reference.paged(
        lengths, kv_heads=KV_HEADS, dim=DIM, block_size=128, dtype=BF16, device=DEVICE, layers=1
    )
    rows = len(lengths)
    plan = attention.DecodePlan.allocate(rows, spread=spread, heads=HEADS, head_dim=DIM, device=DEVICE)
    qkv = random(rows, HEADS + 2 * KV_HEADS, DIM)
    q, out = qkv[:, :HEADS], poisoned(rows, HEADS, DIM)
    known = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)

    def call() -> None:
        attention.decode(q, kv, table, known, plan, scale=SCALE, out=out)

    def error() -> float:
        errors = []
        for row in {*range(min(rows, 6)), rows // 2, rows - 1}:
            if lengths[row]:
                expected = reference.attention(q[row : row + 1], kv, table[row], lengths[row], scale=SCALE)
                errors.append(reference.relative(out[row : row + 1], expected))
            else:
                errors.append(float(out[row].abs().sum()))
        return max(errors)

    return partial(attention.plan_decode, known, plan), call, error


def decode(report: Report) -> None:
    """Split-KV decode over lengths and numbers of works."""
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    default = attention.decode_spread(KV_HEADS, multiprocessors)
    plan, call, error = decode_case([1000, 0, 5, 30_000, 128, 129], default)
    plan()
    call()
    report.check("decode ragged", error())
    report.time("plan_decode 6", replay([plan]))
    jobs = ((1, 1024), (1, 102_400), (32, 1024), (32, 32_768), (256, 1024))
    for rows, length in jobs:
        for spread in sorted({16, 64, 132, 264, 528} | {default}):
            plan, call, error = decode_case([length] * rows, spread)
            plan()
            call()
            if spread == default:
                report.check(f"decode {rows} x {length}", error())
            # One input set: either it is far beyond the cache, or so small that layers in between would evict it,
            # which the copies below stand for.
            calls = [call]
            if rows * length * 1024 < FLUSH:
                for _ in range(min(copies(rows * length * 1024), 24) - 1):
                    other_plan, other, _ = decode_case([length] * rows, spread)
                    other_plan()
                    calls.append(other)
            name = f"decode {rows} x {length}, spread {spread}" + (" *" if spread == default else "")
            report.time(name, replay(calls), moved=rows * length * 1024)


def prefill_case(
    queries: Sequence[int], lengths: Sequence[int], block_size: int = 128
) -> tuple[Callable[[], object], Callable[[], float]]:
    """A call of attention over a ragged batch, and its error on the ends of the rows."""
    kv, table = reference.paged(
        lengths, kv_heads=KV_HEADS, dim=DIM, block_size=block_size, dtype=BF16, device=DEVICE, layers=1
    )
    total = sum(queries)
    qkv = random(total, HEADS + 2 * KV_HEADS, DIM)
    q, out = qkv[:, :HEADS], poisoned(total, HEADS, DIM)
    ends = torch.tensor(queries).cumsum(0).tolist()
    starts = torch.tensor([0, *ends], dtype=torch.int32, device=DEVICE)
    known = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    tiles = torch.from_numpy(attention.prefill_tiles(queries, lengths, HEADS // KV_HEADS)).to(DEVICE)

    def call() -> None:
        attention.prefill(q, kv, table, known, starts, tiles, scale=SCALE, out=out)

    def error() -> float:
        errors = [float(out.isnan().any()) and float("nan")]
        for row, (end, count, length) in enumerate(zip(ends, queries, lengths, strict=True)):
            few = min(count, 24)
            first = slice(end - count, end - count + few)
            expected = reference.attention(q[first], kv, table[row], length - count + few, scale=SCALE)
            errors.append(reference.relative(out[first], expected))
            last = slice(end - few, end)
            expected = reference.attention(q[last], kv, table[row], length, scale=SCALE)
            errors.append(reference.relative(out[last], expected))
        return max(errors)

    return call, error


def prefill(report: Report) -> None:
    """Packed prefill; operations are counted for the causal half only."""
    call, error = prefill_case([1, 700, 33, 128], [5000, 700, 900, 4096])
    call()
    report.check("prefill ragged", error())
    call, error = prefill_case([1, 700, 33, 128], [5000, 700, 900, 4096], block_size=16)
    call()
    report.check("prefill ragged, blocks of 16", error())
    for count, length in ((8192, 8192), (2048, 32_768), (8192, 32_768), (2048, 102_400)):
        call, error = prefill_case([count], [length])
        call()
        report.check(f"prefill {count} / {length}", error())
        flop = 4 * HEADS * DIM * (count * (length - count) + count * count / 2)
        report.time(f"prefill {count} / {length}", replay([call], rounds=2), flop=flop)


@contextmanager
def constants(**values: int) -> Iterator[None]:
    """Other tile shapes for attention, for as long as it takes to time them."""
    before = {name: getattr(attention, name) for name in values}
    for name, value in values.items():
        setattr(attention, name, value)
    yield
    for name, value in before.items():
        setattr(attention, name, value)


def sweep(report: Report) -> None:
    """Attention over tile shapes, stages and warps."""
    spread = attention.decode_spread(KV_HEADS, torch.cuda.get_device_properties(0).multi_processor_count)
    for keys, stages in ((64, 2), (64, 3), (64, 4), (128, 2), (128, 3), (32, 4)):
        with constants(DECODE_KEYS=keys, DECODE_STAGES=stages):
            for rows, length in ((1, 102_400), (32, 1024), (32, 32_768), (256, 1024)):
                plan, call, _ = decode_case([length] * rows, spread)
                plan()
                us = replay([call])
                report.time(f"decode {rows} x {length}: keys {keys} stages {stages}", us, moved=rows * length * 1024)
    for rows, keys, warps, stages in (
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (128, 128, 8, 2),
        (128, 128, 8, 3),
        (128, 64, 4, 2),
        (64, 64, 4, 2),
        (64, 128, 4, 2),
    ):
        with constants(PREFILL_ROWS=rows, PREFILL_KEYS=keys, PREFILL_WARPS=warps, PREFILL_STAGES=stages):
            call, error = prefill_case([4096], [32_768])
            call()
            name = f"prefill 4096 / 32768: rows {rows} keys {keys} warps {warps} stages {stages}"
            report.check(name, error())
            flop = 4 * HEADS * DIM * (4096 * (32_768 - 4096) + 4096 * 4096 / 2)
            report.time(name, replay([call], rounds=2), flop=flop)


def linear(report: Report) -> None:
    """One row against cuBLAS; weights rotate."""
    totals = {"cuBLAS": 0.0, "linear": 0.0}
    for name, (width, size) in {**LAYER_LINEARS, "lm_head": (VOCABULARY, HIDDEN)}.items():
        weights = [random(width, size) for _ in range(copies(width * size * 2))]
        x, out = random(1, size), poisoned(1, width)
        linear_triton.linear(x, weights[0], None, out)
        report.check(f"linear {name}", reference.relative(out, x.double() @ weights[0].double().T))
        calls: dict[str, Callable[[Tensor], object]] = {
            "cuBLAS": partial(F.linear, x),
            "linear": partial(_linear, x, out),
        }
        for kind, call in calls.items():
            us = replay([partial(call, weight) for weight in weights])
            report.time(f"{kind} {name}", us, moved=width * size * 2)
            totals[kind] += us * (1 if name == "lm_head" else 40)
    for kind, total in totals.items():
        report.time(f"{kind}: 40 layers and head, one row", total, moved=18_800_000_000)


def _linear(x: Tensor, out: Tensor, weight: Tensor) -> None:
    linear_triton.linear(x, weight, None, out)


def draw(report: Report) -> None:
    """Greedy, sampled and limited draws; tokens must be those of the plain twin."""
    for rows in (1, 32, 256):
        _draw(report, rows)


def _draw(report: Report, rows: int) -> None:
    how = sampling.Rows.allocate(rows, DEVICE)
    drawn = sampling.Drawn.allocate(rows, TOKENS, DEVICE)
    pool = torch.zeros(rows, 64, dtype=torch.int32, device=DEVICE)
    logits = [random(rows, VOCABULARY) * 3 for _ in range(min(copies(rows * VOCABULARY * 2), 8))]
    calls = [partial(sampling.draw, x, TOKENS, how, drawn, pool, limited=False) for x in logits]
    limited = [partial(sampling.draw, x, TOKENS, how, drawn, pool, limited=True) for x in logits]
    moved = rows * TOKENS * 2

    first = logits[0][:, :TOKENS].float()
    calls[0]()
    report.check(f"draw {rows}: greedy tokens that differ", float((drawn.token != first.argmax(-1)).sum()), 0)
    exact = first.double().log_softmax(-1).gather(1, drawn.token[:, None].long()).squeeze(1)
    report.check(f"draw {rows}: log-probabilities", reference.relative(drawn.logprob, exact), 1e-5)
    report.time(f"draw {rows}, greedy", replay(calls), moved=moved)

    how.temperature.fill_(0.8)
    how.seed.copy_(torch.arange(rows))
    calls[0]()
    scaled = [x / 0.8 for x in first[:8]]
    expected = [sample.draw(x, None, seed=row, index=0) for row, x in enumerate(scaled)]
    unlike = sum(one != other for one, other in zip(drawn.token.tolist(), expected, strict=False))
    report.check(f"draw {rows}: sampled tokens that differ", unlike, 0)
    report.time(f"draw {rows}, temperature", replay(calls), moved=moved)

    how.top_p.fill_(0.9)
    report.time(f"draw {rows}, top_p 0.9", replay(limited), moved=moved)
    how.top_k.fill_(50)
    limited[0]()
    kept = [sample.candidates(x, top_k=50, top_p=0.9, min_p=0.0) for x in scaled]
    # The least candidate is the threshold, but for how the device divides.
    off = [abs(float(x[ids].min()) - float(t)) for x, ids, t in zip(scaled, kept, drawn.threshold, strict=False)]
    report.check(f"draw {rows}: thresholds", max(off), 1e-5)
    report.time(f"draw {rows}, top_k 50 top_p 0.9", replay(limited), moved=moved)


SECTIONS: dict[str, Callable[[Report], None]] = {
    "small": small_kernels,
    "rope": rope,
    "decode": decode,
    "prefill": prefill,
    "linear": linear,
    "sweep": sweep,
    "draw": draw,
}


def chosen(only: str) -> Iterator[tuple[str, Callable[[Report], None]]]:
    names = only.split(",") if only else [name for name in SECTIONS if name != "sweep"]
    return ((name, SECTIONS[name]) for name in names)


def main() -> int:
    """Run the sections asked for; 1 if any kernel was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="sections, by commas, of " + ", ".join(SECTIONS) + "; all but sweep")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    options = parser.parse_args()
    torch.manual_seed(0)
    report = Report()
    begin = time.perf_counter()
    for name, section in chosen(options.only):
        section(report)
        torch.cuda.empty_cache()
        print(f"----- {name}: {time.perf_counter() - begin:.0f} s so far", flush=True)
    if options.json:
        about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        options.json.write_text(json.dumps({**about, "rows": report.rows}, indent=1))
    print("WRONG: " + ", ".join(report.wrong) if report.wrong else "all right")
    return bool(report.wrong)


if __name__ == "__main__":
    sys.exit(main())
