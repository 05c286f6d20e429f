"""Forward passes on a GPU: eager for any step, a captured graph for steps of decode rows alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surefoot.device.gpu_backends import Backend, PrefillRow
from surefoot.device.gpu_cache import GpuCache
from surefoot.device.gpu_inputs import StepTensors
from surefoot.model.layers import Attention, Network
from surefoot.ops import attention_triton as attention
from surefoot.ops.norm_rope_triton import rope_and_store
from surefoot.spec import ModelSpec
from surefoot.types import Limits


class GpuRunner:
    """The network over its cache."""

    def __init__(self, spec: ModelSpec, network: Network, cache: GpuCache, limits: Limits, backend: Backend) -> None:
        self.spec = spec
        self.network = network
        self.cache = cache
        self.device = cache.data.device
        self._backend = backend
        processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        self._plan = attention.DecodePlan.allocate(
            limits.max_num_seqs,
            spread=attention.decode_spread(spec.num_kv_heads, processors),
            heads=spec.num_heads,
            head_dim=spec.head_dim,
            device=self.device,
        )
        dtype = cache.data.dtype
        self._logits = torch.zeros(limits.max_num_seqs, spec.vocab_size, dtype=dtype, device=self.device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._graph_memory = torch.cuda.graph_pool_handle()
        self._turns: dict[int, Tensor] = {}

    def forward(self, step: StepTensors, tables: Tensor, pool: Tensor, prefills: Sequence[PrefillRow] = ()) -> Tensor:
        """Hidden rows [tokens, hidden]; keys and values of these tokens are in the cache afterwards."""
        ids = exchange_inputs(step, pool)
        decodes, heads = step.shape.decode_rows, self.spec.num_heads
        row_tables = tables.index_select(0, step.row_slot)
        lengths = step.length[:decodes]
        if decodes:
            attention.plan_decode(lengths, self._plan)
        prefill = self._backend.prepare(step, row_tables, prefills) if prefills else None

        def attend(layer: int, qkv: Tensor, how: Attention) -> Tensor:
            kv = self.cache.layer(layer)
            self._rotate_and_store(qkv, step, kv, how)
            q = qkv[:, :heads]
            if prefill is not None and not decodes:
                return prefill(q, kv, how.scale, None).flatten(1)
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            if decodes:
                attention.decode(
                    q[:decodes], kv, row_tables[:decodes], lengths, self._plan, scale=how.scale, out=out[:decodes]
                )
            if prefill is not None:
                prefill(q[decodes:], kv, how.scale, out[decodes:])
            return out.flatten(1)

        return self.network.forward(ids, attend)

    def logits(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """[len(tokens), vocabulary]: only tokens that are sampled from meet the output projection."""
        return self.network.logits(hidden.index_select(0, tokens))

    def _rotate_and_store(self, qkv: Tensor, step: StepTensors, kv: Tensor, how: Attention) -> None:
        rope_and_store(
            qkv,
            self._real_turns(how.turns),
            step.position,
            kv,
            step.kv_slots,
            heads=self.spec.num_heads,
            q_norm=how.q_norm,
            k_norm=how.k_norm,
            eps=how.eps,
        )

    def _real_turns(self, turns: Tensor | None) -> Tensor:
        """[max_position, pairs, 2] float32, cosines and sines; a view that is made once."""
        if turns is None:
            raise NotImplementedError("layers that do not turn have no kernel yet")
        if id(turns) not in self._turns:
            self._turns[id(turns)] = torch.view_as_real(turns)
        return self._turns[id(turns)]

    # ---- graphs ------------------------------------------------------------------------------------------------------

    def graph_size(self, rows: int) -> int | None:
        """The smallest captured size for this many decode rows, or None."""
        return min((size for size in self._graphs if size >= rows), default=None)

    def capture(self, step: StepTensors, tables: Tensor, pool: Tensor) -> None:
        """Capture a step of decode rows alone over the static tensors of `step`; it must have run once before."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_memory):
            self.decode_step(step, tables, pool)
        self._graphs[step.shape.rows] = graph

    def decode_step(self, step: StepTensors, tables: Tensor, pool: Tensor) -> Tensor:
        """Logits [rows, vocabulary] of a step of decode rows alone, valid until the next such step."""
        hidden = self.forward(step, tables, pool)
        return self.network.logits(hidden, out=self._logits[: step.shape.rows])

    def replay(self, size: int) -> Tensor:
        """`decode_step` of what was staged last, by its graph."""
        self._graphs[size].replay()
        return self._logits[:size]


def exchange_inputs(step: StepTensors, pool: Tensor) -> Tensor:
    """Input ids [tokens] int32: given ones go into the token pool, PENDING ones (-1) come out of it."""
    at = step.pool_row.long() * pool.shape[1] + step.position
    flat = pool.view(-1)
    ids = torch.where(step.token < 0, flat[at], step.token)
    flat[at] = ids
    return ids
