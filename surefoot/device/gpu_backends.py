"""Prefill attention on a GPU: which kernel, decided once at start by a trial against the oracle.

    fa3       FlashAttention 3 from the package fa3-fwd: sm90, blocks of a multiple of 128 tokens
    triton    always there: sm80 and later, any block size

A backend is built once per step (`prepare`) and called once per layer.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from surefoot.device import memory
from surefoot.device.gpu_cache import GpuCache
from surefoot.device.gpu_inputs import StepTensors
from surefoot.ops import attention_triton as attention
from surefoot.ops.attention import attend_reference
from surefoot.spec import ModelSpec

log = logging.getLogger(__name__)


def fa3_least_queries(group: int, head_dim: int) -> int:
    """The shortest longest query that FlashAttention 3 takes with a paged cache: its queries fill more than a tile."""
    tile = 192 if head_dim <= 64 else 128
    return tile // group + 1


Attend = Callable[[Tensor, Tensor, float], Tensor]
"""(queries [tokens, heads, head_dim] of a step, one layer of the cache, scale) → the same shape.

Only tokens of prefill rows are computed; what the result holds for others means nothing.
"""


PrefillRow = tuple[int, int]
"""(tokens to compute, context with these tokens) of one row."""


class Backend(Protocol):
    """Prepares attention over the prefill rows of one step."""

    name: str
    graphs: bool
    """Whether it can be captured: nothing on the host depends on the rows but their number and longest query."""

    def prepare(self, step: StepTensors, tables: Tensor, rows: Sequence[PrefillRow]) -> Attend:
        """`tables` [rows, blocks] of all rows of the step, whose last are the prefill `rows`."""
        ...


class Triton:
    """The packed kernel of `ops.attention_triton`."""

    name = "triton"
    graphs = False

    def __init__(self, spec: ModelSpec) -> None:
        self._group = spec.num_heads // spec.num_kv_heads

    def prepare(self, step: StepTensors, tables: Tensor, rows: Sequence[PrefillRow]) -> Attend:
        tables, lengths, begins = _of_prefills(step, tables)
        queries, contexts = zip(*rows, strict=True)
        tiles = torch.from_numpy(attention.prefill_tiles(queries, contexts, self._group))
        tiles = tiles.pin_memory().to(tables.device, non_blocking=True)

        def attend(q: Tensor, kv: Tensor, scale: float) -> Tensor:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            attention.prefill(q, kv, tables, lengths, begins, tiles, scale=scale, out=out)
            return out

        return attend


class FlashAttention3:
    """fa3-fwd; a step whose longest query is too short for it goes to the Triton kernel."""

    name = "fa3"
    graphs = True

    def __init__(self, spec: ModelSpec) -> None:
        import fa3_fwd._C  # noqa: F401 - registers the kernel

        self._kernel = torch.ops.fa3_fwd.fwd  # its Python interface is a custom operator: 4 s of imports at first use
        self._least = fa3_least_queries(spec.num_heads // spec.num_kv_heads, spec.head_dim)
        self._short = Triton(spec)

    def prepare(self, step: StepTensors, tables: Tensor, rows: Sequence[PrefillRow]) -> Attend:
        longest = max(queries for queries, _ in rows)
        if longest < self._least:
            return self._short.prepare(step, tables, rows)
        tables, lengths, begins = _of_prefills(step, tables)

        def attend(q: Tensor, kv: Tensor, scale: float) -> Tensor:
            return self.attend(q, kv, tables, lengths, begins, longest=longest, scale=scale)

        return attend

    def attend(
        self, q: Tensor, kv: Tensor, tables: Tensor, lengths: Tensor, begins: Tensor, *, longest: int, scale: float
    ) -> Tensor:
        """Causal attention of packed queries [tokens, heads, head_dim] over paged keys and values."""
        out: Tensor = self._kernel(
            q,
            kv[:, 0],
            kv[:, 1],
            cu_seqlens_q=begins,
            seqused_k=lengths,
            max_seqlen_q=longest,
            page_table=tables,
            softmax_scale=scale,
            is_causal=True,
        )[0]
        return out


def _of_prefills(step: StepTensors, tables: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Block tables and contexts of prefill rows, and where each row's queries begin among the step's tokens."""
    decodes = step.shape.decode_rows
    return tables[decodes:], step.length[decodes:], step.starts[decodes:]


def choose(spec: ModelSpec, cache: GpuCache) -> Backend:
    """The fastest backend that computes what the oracle does here."""
    triton = Triton(spec)
    if importlib.util.find_spec("fa3_fwd") is None:
        log.info("prefill attention: triton (fa3-fwd is not installed)")
        return triton
    major, _ = torch.cuda.get_device_capability(cache.data.device)
    if major != 9 or cache.block_size % 128 or cache.data.dtype == torch.float32:
        log.info("prefill attention: triton (fa3 needs sm90, 16 bits and blocks of a multiple of 128)")
        return triton
    tried = memory.guard(lambda: _agrees(FlashAttention3(spec), spec, cache))
    if isinstance(tried, memory.Ok) and tried.value is not None:
        log.info("prefill attention: fa3")
        return tried.value
    log.warning("prefill attention: triton (fa3 does not work here: %s)", getattr(tried, "reason", "wrong result"))
    return triton


@torch.inference_mode()
def _agrees(backend: FlashAttention3, spec: ModelSpec, cache: GpuCache) -> FlashAttention3 | None:
    """`backend` if it agrees with the plain twin on one prompt of a block, written to the sink."""
    device, tokens = cache.data.device, cache.block_size
    generator = torch.Generator(device).manual_seed(0)
    shape = (tokens, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
    qkv = torch.randn(shape, generator=generator, device=device).to(cache.data.dtype)
    q, k, v = torch.split(qkv, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
    layer = cache.layer(0)
    layer[cache.sink, 0, :tokens], layer[cache.sink, 1, :tokens] = k, v
    out = torch.full_like(q, torch.nan).contiguous()
    table = torch.tensor([[cache.sink]], dtype=torch.int32, device=device)
    length = torch.tensor([tokens], dtype=torch.int32, device=device)
    begins = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    scale = spec.head_dim**-0.5
    out.copy_(backend.attend(q, layer, table, length, begins, longest=tokens, scale=scale))
    expected = attend_reference(q.float(), k.float(), v.float(), start=0, scale=scale)
    cache.zero([cache.sink])
    error = (out.float() - expected).norm() / expected.norm()
    return backend if bool(error < 2e-2) else None
