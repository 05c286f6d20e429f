"""Paged attention against its plain twin, and the primitives that its invariance rests on."""

from __future__ import annotations

import pytest
import torch

from surefoot.device.inputs import TokenPool, build
from surefoot.device.kvcache import KVCache
from surefoot.ops.attention import LANES, ROWS, VALUE_TILE, attend, attend_reference
from surefoot.ops.kv_store import store
from surefoot.plan import QUERY_TILE
from surefoot.spec import ModelSpec
from surefoot.types import SamplingParams, Work

HEADS, KV_HEADS, DIM = 6, 2, 16


def spec() -> ModelSpec:
    return ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=8,
        token_count=8,
        hidden_size=96,
        intermediate_size=8,
        num_layers=2,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        max_position=1024,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        tie_word_embeddings=True,
        attention_bias=False,
        eos_token_ids=(),
        bos_token_id=None,
        dtype="float32",
    )


def work(slot: int, start: int, count: int, table: tuple[int, ...]) -> Work:
    return Work(
        request=slot,
        child=0,
        epoch=0,
        slot=slot,
        start=start,
        tokens=(1,) * count,
        table=table,
        known=None,
        samples=(),
        params=SamplingParams(),
        decoding=False,
    )


@pytest.mark.parametrize(
    ("block_size", "window", "softcap"),
    [(5, None, None), (16, None, None), (24, None, 2.0), (5, 7, None), (16, 1, None), (16, 130, None), (24, 64, 2.0)],
)
def test_paged_attention_equals_the_plain_one(block_size: int, window: int | None, softcap: float | None) -> None:
    """Chunks and single tokens of sequences on scattered blocks see exactly what of their own past they may."""
    generator = torch.Generator().manual_seed(block_size)
    cache = KVCache(spec(), num_blocks=700, block_size=block_size, dtype=torch.float32, device=torch.device("cpu"))
    cache.data.normal_(generator=generator)
    shapes = [(0, 1), (0, 70), (130, 1), (37, 40), (300, 1), (255, 2), (11, 1), (800, 90), (880, 1)]
    ids = torch.randperm(700, generator=generator).tolist()
    works, pasts = [], []
    for slot, (start, count) in enumerate(shapes):
        table = tuple(ids.pop() for _ in range(-(-(start + count) // block_size)))
        works.append(work(slot, start, count, table))
        past = torch.randn(start, 2 * KV_HEADS, DIM, generator=generator)
        at = torch.arange(start)
        if start:
            index = cache.token_index(torch.tensor(table)[at // block_size], at % block_size)
            store(cache.token_rows(1), index, past)
        pasts.append(past)
    inputs = build(works, TokenPool(len(works), 900), cache, HEADS // KV_HEADS, (window,))
    qkv = torch.randn(len(inputs.tokens), HEADS + 2 * KV_HEADS, DIM, generator=generator)
    store(cache.token_rows(1), inputs.store_index, qkv[:, HEADS:])
    segments = inputs.segments[window]
    out = attend(qkv[:, :HEADS], cache.head_rows(1), segments, kv_heads=KV_HEADS, scale=0.25, softcap=softcap)
    for at, (begin, end) in zip(inputs.order, inputs.spans, strict=True):
        both = torch.cat([pasts[at], qkv[begin:end, HEADS:]])
        keys, values = both.split(KV_HEADS, dim=1)
        start = works[at].start
        expected = attend_reference(
            qkv[begin:end, :HEADS], keys, values, start=start, scale=0.25, window=window, softcap=softcap
        )
        torch.testing.assert_close(out[begin:end], expected, rtol=1e-4, atol=1e-5)


def test_what_a_window_left_behind_is_not_read() -> None:
    """Attention with a window gathers about the window, however long the sequence; one that covers it costs nothing."""
    cache = KVCache(spec(), num_blocks=60, block_size=16, dtype=torch.float32, device=torch.device("cpu"))
    works = [work(0, 900, 1, tuple(range(57))), work(1, 800, 90, tuple(range(56)))]
    inputs = build(works, TokenPool(2, 1000), cache, HEADS // KV_HEADS, (None, 100, 4096))
    assert inputs.segments[4096] is inputs.segments[None]
    gathered = [len(segment.index) * 16 // (2 * KV_HEADS) for segment in inputs.segments[100]]
    assert gathered[0] <= 1 + 100 + VALUE_TILE + LANES
    assert gathered[1] <= 90 + 100 + VALUE_TILE + LANES
    for tile in inputs.segments[100][1].tiles:
        assert tile.length <= QUERY_TILE + 100 + VALUE_TILE + LANES


@pytest.mark.parametrize("dim", [16, 64, 128])
def test_products_of_a_tile_do_not_depend_on_its_shape(dim: int) -> None:
    """What attention builds on: a row of a batched product has the same bits for any number of rows and any padding."""
    generator = torch.Generator().manual_seed(dim)
    values = torch.randn(3, VALUE_TILE, dim, generator=generator)
    shares = torch.rand(3, 192, VALUE_TILE, generator=generator)
    shares[..., 90:] = 0
    queries = torch.randn(3, 192, dim, generator=generator)
    weighted = torch.bmm(shares, values)
    scores = torch.bmm(queries, values.transpose(1, 2))
    for rows in range(ROWS, 192, ROWS):
        assert torch.equal(torch.bmm(queries[:, :rows], values.transpose(1, 2)), scores[:, :rows])
        for length in (96, 112, VALUE_TILE):
            cut = torch.bmm(shares[:, :rows, :length].contiguous(), values[:, :length])
            assert torch.equal(cut, weighted[:, :rows])
