"""Vocabularies of tiktoken (https://github.com/openai/tiktoken): lines of "base64-of-bytes rank", read without it.

A text is cut by a pattern; a piece that is a token itself is that token, other pieces are merged from single bytes on,
the pair that makes the token of the lowest rank first. `tokenizers` merges by a list of pairs instead: every way to
cut a token into two others, in the order of the token's rank, gives the same tokens for ranks that byte-pair training
made.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from surefoot.errors import CheckpointError


@cache
def byte_alphabet() -> Mapping[int, str]:
    """GPT-2's byte-level alphabet: printable Latin-1 stands for itself, other bytes for characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token → id. Raises CheckpointError naming file and line, or what is missing: ids 0 … n-1 and all single bytes."""
    ranks: dict[bytes, int] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise CheckpointError(
                f"{path}: line {number} is not base64 and a rank ({error}); this is not a tiktoken vocabulary."
            ) from error
    if sorted(ranks.values()) != list(range(len(lines))):
        raise CheckpointError(f"{path}: ranks or tokens are there twice or missing; there are {len(lines):,} lines.")
    if lacking := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise CheckpointError(f"{path}: the byte {lacking[0]:#04x} has no token; the file is incomplete.")
    return ranks


def make_backend(ranks: Mapping[bytes, int], pattern: str, specials: Mapping[int, str], where: Path) -> Tokenizer:
    """A tokenizer that encodes as tiktoken does with these ranks and this pattern, with special tokens after them.

    Raises CheckpointError naming `where` for special tokens whose ids do not follow the ranks.
    """
    alphabet = dict(byte_alphabet())
    names = {token: token.decode("latin-1").translate(alphabet) for token in ranks}
    vocab = {names[token]: rank for token, rank in ranks.items()}
    backend = Tokenizer(BPE(vocab=vocab, merges=_merges(ranks, names), ignore_merges=True))
    cut = pre_tokenizers.Split(Regex(pattern), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    added = [AddedToken(text, special=True, normalized=False) for _, text in sorted(specials.items())]
    backend.add_special_tokens(added)
    for token, text in specials.items():
        if backend.token_to_id(text) != token:
            raise CheckpointError(
                f"{where}: special token {text!r} has id {token}, but {len(ranks):,} ranks and the special tokens "
                f"before it put it at {backend.token_to_id(text)}."
            )
    return backend


def _merges(ranks: Mapping[bytes, int], names: Mapping[bytes, str]) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a token, by that token's rank, then by the pair's own ranks."""
    merges = sorted(
        (rank, ranks[left], ranks[right], names[left], names[right])
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if (left := token[:cut]) in ranks and (right := token[cut:]) in ranks
    )
    return [(left, right) for *_, left, right in merges]
