"""Forward passes on a GPU: eager for any step, a captured graph for steps of decode rows alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surefoot.device.gpu_backends import Backend, PrefillRow
from surefoot.device.gpu_cache import GpuCache
from surefoot.device.gpu_inputs import Shape, StepTensors
from surefoot.model.layers import Attention, Network
from surefoot.ops import attention_triton as attention
from surefoot.ops.norm_rope_triton import rope_and_store
from surefoot.spec import ModelSpec
from surefoot.types import Limits

PREFILL_ROWS = 16
"""Prompts that a captured mixed step has room for."""
MOST_FORKS = 128
"""Samples that a step may draw beside one for each row: the children of one prompt."""
MOST_PADDING = 256
"""Tokens of padding that a step of prompts is worth: computing them costs less than launching its kernels by hand."""


class GpuRunner:
    """The network over its cache."""

    def __init__(self, spec: ModelSpec, network: Network, cache: GpuCache, limits: Limits, backend: Backend) -> None:
        self.spec = spec
        self.network = network
        self.cache = cache
        self.device = cache.data.device
        self._backend = backend
        processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        self._plan_rows = min(limits.max_num_seqs + MOST_FORKS, attention.MAX_ROWS)
        self._plan = attention.DecodePlan.allocate(
            self._plan_rows,
            spread=attention.decode_spread(spec.num_kv_heads, processors),
            heads=spec.num_heads,
            head_dim=spec.head_dim,
            device=self.device,
        )
        dtype = cache.data.dtype
        rows, tokens = limits.max_num_seqs + PREFILL_ROWS, limits.max_num_batched_tokens + limits.max_num_seqs
        self._logits = torch.zeros(rows, spec.vocab_size, dtype=dtype, device=self.device)
        self._finite = torch.zeros(tokens, dtype=torch.bool, device=self.device)
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}
        self._graph_memory = torch.cuda.graph_pool_handle()
        self._turns: dict[int, Tensor] = {}

    def forward(
        self, step: StepTensors, tables: Tensor, pool: Tensor, prefills: Sequence[PrefillRow] = ()
    ) -> tuple[Tensor, Tensor]:
        """Hidden rows of the tokens that are sampled from [samples, hidden], and which tokens are finite [tokens].

        Keys and values of all tokens are in the cache afterwards. A token is judged by what the last layer projects of
        it, which holds all that the cache gets to see.
        """
        ids = exchange_inputs(step, pool)
        decodes, heads = step.shape.decode_rows, self.spec.num_heads
        row_tables = tables.index_select(0, step.row_slot)
        lengths = step.length[:decodes]
        if decodes:
            attention.plan_decode(lengths, self._plan)
        prefill = self._backend.prepare(step, row_tables, prefills) if prefills else None
        finite: list[Tensor] = []

        def attend(layer: int, qkv: Tensor, how: Attention) -> Tensor:
            kv = self.cache.layer(layer)
            last = layer == self.spec.num_layers - 1
            if last:
                finite.append(qkv.flatten(1).sum(-1, dtype=torch.float32).isfinite())
            self._rotate_and_store(qkv, step, kv, how)
            q = qkv[:, :heads]
            if last and prefill is not None and len(step.source) <= self._plan_rows:
                return self._attend_sampled(q, kv, step, row_tables, how.scale).flatten(1)
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if prefill is None else prefill(q, kv, how.scale)
            if decodes:
                attention.decode(
                    q[:decodes],
                    kv,
                    row_tables[:decodes],
                    lengths,
                    self._plan,
                    scale=how.scale,
                    out=out[:decodes],
                    keep_padding=prefill is not None,
                )
            return out.flatten(1)

        all_rows = step.shape.padded and not prefills  # one sample a row, one token a row
        hidden = self.network.forward(ids, step.position, attend, keep=None if all_rows else step.source)
        return hidden, finite[0]

    def _attend_sampled(self, q: Tensor, kv: Tensor, step: StepTensors, row_tables: Tensor, scale: float) -> Tensor:
        """Attention of the last layer, [tokens, heads, head_dim]: of tokens that are sampled from, as if they decoded.

        What it holds for other tokens means nothing. Samples that are padding look at the first token.
        """
        source = step.source.long()
        found = torch.searchsorted(step.starts, step.source, right=True) - 1
        rows = found.clamp_(max=step.shape.rows - 1)  # a step of nothing but padding begins and ends at 0
        lengths = step.position[source] + 1
        attention.plan_decode(lengths, self._plan)
        sampled = torch.empty(len(source), *q.shape[1:], dtype=q.dtype, device=q.device)
        attention.decode(q[source], kv, row_tables[rows], lengths, self._plan, scale=scale, out=sampled)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        out[source] = sampled
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary]."""
        return self.network.logits(hidden)

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

    def find(self, tokens: int, decodes: int, prefills: int) -> Shape | None:
        """The smallest captured shape that holds a step, or None where there is none that is not mostly padding."""
        most = tokens + max(MOST_PADDING, tokens // 8) if prefills else 1 << 30
        fitting = (
            shape
            for shape in self._graphs
            if tokens <= shape.tokens <= most
            and decodes <= shape.decode_rows
            and prefills <= shape.rows - shape.decode_rows
            and (prefills > 0) == (shape.rows > shape.decode_rows)
        )
        return min(fitting, key=lambda shape: (shape.tokens, shape.decode_rows), default=None)

    def capture(self, step: StepTensors, tables: Tensor, pool: Tensor) -> None:
        """Capture a step over the static tensors of `step`; it must have run once before."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_memory):
            self.padded_step(step, tables, pool)
        self._graphs[step.shape] = graph

    def padded_step(self, step: StepTensors, tables: Tensor, pool: Tensor) -> None:
        """Logits of every row, and which tokens are finite, into the static `results` of this shape."""
        shape = step.shape
        prefills = [(shape.tokens, shape.tokens)] if shape.rows > shape.decode_rows else []
        hidden, self._finite[: shape.tokens] = self.forward(step, tables, pool, prefills)
        self.network.logits(hidden, out=self._logits[: shape.rows])

    def replay(self, shape: Shape) -> tuple[Tensor, Tensor]:
        """`padded_step` of what was staged last, by its graph: logits [rows, vocabulary] and finite tokens [tokens]."""
        self._graphs[shape].replay()
        return self._logits[: shape.rows], self._finite[: shape.tokens]


def exchange_inputs(step: StepTensors, pool: Tensor) -> Tensor:
    """Input ids [tokens] int32: given ones go into the token pool, PENDING ones (-1) come out of it."""
    at = step.pool_row.long() * pool.shape[1] + step.position
    flat = pool.view(-1)
    ids = torch.where(step.token < 0, flat[at], step.token)
    flat[at] = ids
    return ids
