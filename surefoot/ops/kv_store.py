"""Writing keys and values of a step into their blocks."""

from __future__ import annotations

from torch import Tensor


def store(rows: Tensor, index: Tensor, kv: Tensor) -> None:
    """Scatter one layer's new keys and values.

    `rows` [·, head_dim] is the cache from this layer's first row on, `index` [n, 2·kv_heads] (int64) the row of each
    token's key heads and then value heads, `kv` [n, 2·kv_heads, head_dim] what to write there.
    """
    rows.index_put_((index,), kv)
