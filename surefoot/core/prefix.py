"""Which block holds which prefix: full blocks by the hash of every token up to their end.

    tokens   [ block 0 )[ block 1 )[ block 2 )[ par…
    hashes   h0 = H(salt, tokens of 0)    h1 = H(h0, tokens of 1)    h2 = H(h1, tokens of 2)

A hash names the whole text before it, so equal hashes mean equal keys and values, whoever computed them. Blocks are
published in commit only. A block that nobody holds stays in the index until it is evicted, the longest unused first.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

Hash = bytes


def block_hash(parent: Hash, tokens: Sequence[int]) -> Hash:
    """Hash of a block of `tokens` whose text before is named by `parent` (the salt, for the first)."""
    return blake2b(array("i", tokens).tobytes(), key=parent[:64], digest_size=16).digest()


def root(salt: str) -> Hash:
    """What the first block is chained to: requests of another salt never meet in the index."""
    return blake2b(salt.encode(), digest_size=16).digest()


class PrefixIndex:
    """Published blocks by hash. Written by commit (`publish`) and by the pool (`remove`); `match` only reads."""

    def __init__(self) -> None:
        self._blocks: dict[Hash, int] = {}
        self._hashes: dict[int, Hash] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._hashes

    def __len__(self) -> int:
        return len(self._hashes)

    def publish(self, name: Hash, block: int) -> None:
        """Offer a full, committed block; where this text is published already, the earlier block stays."""
        if name not in self._blocks and block not in self._hashes:
            self._blocks[name] = block
            self._hashes[block] = name

    def remove(self, block: int) -> None:
        """The block is going to hold something else."""
        name = self._hashes.pop(block, None)
        if name is not None:
            del self._blocks[name]

    def rename(self, old: int, new: int) -> None:
        """What block `old` held is in `new` from here on."""
        name = self._hashes.pop(old, None)
        if name is not None:
            self._hashes[new] = name
            self._blocks[name] = new

    def match(self, names: Iterable[Hash]) -> tuple[int, ...]:
        """Blocks of the longest published prefix of a chain of hashes."""
        found = []
        for name in names:
            block = self._blocks.get(name)
            if block is None:
                break
            found.append(block)
        return tuple(found)
