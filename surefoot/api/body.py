"""A request's body: bounded while it is read, strict while it is parsed.

The JSON standard leaves doubtful texts to the parser. Here every one of them is refused, naming the field: a name given
twice, NaN and infinities in any spelling, numbers beyond 64 bits, lone surrogates, deep nesting, invalid UTF-8.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any, Final

from starlette.requests import Request

from surefoot.errors import InvalidRequest, PayloadTooLarge
from surefoot.sampling import shown

MAX_DEPTH: Final = 32
_IN_A_THREAD: Final = 64 << 10
"""Bytes from which parsing leaves the event loop."""


class _Twice(str):
    """Stands in the tree where an object names the same field twice; holds that name."""

    __slots__ = ()


async def read_json_object(request: Request, *, limit: int) -> dict[str, Any]:
    """The body as a JSON object.

    Raises PayloadTooLarge once `limit` bytes are exceeded, whatever the headers say, and InvalidRequest for a body that
    is not a JSON object in every particular; `param` is the top-level field at fault, where there is one.
    """
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type != "application/json":
        raise InvalidRequest("Unsupported Media Type: Only 'application/json' is allowed")
    body = await read_bounded(request, limit=limit)
    if len(body) >= _IN_A_THREAD:
        return await asyncio.to_thread(parse_object, body)
    return parse_object(body)


async def read_bounded(request: Request, *, limit: int) -> bytes:
    """The raw body, refused as soon as it is known to exceed `limit` bytes: by its header, or while it arrives."""
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdecimal() and int(declared[:20]) > limit:
        raise _too_large(limit)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise _too_large(limit)
    return bytes(body)


def parse_object(body: bytes) -> dict[str, Any]:
    """Strict JSON of an object; raises InvalidRequest."""
    try:
        value = _loads(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The body is not valid UTF-8: {error.reason} at byte {error.start}.") from None
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"The body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}."
        ) from None
    except RecursionError:
        raise InvalidRequest(f"The body is nested more than {MAX_DEPTH} levels deep.") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"The body must be a JSON object, got {shown(value)}.")
    _check(value)
    return value


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"The request body is larger than {limit:,} bytes, the most that this server reads.")


def _loads(text: str) -> object:
    """JSON as a tree, with NaN for its constants. A prompt may be 100,000 integers: they meet no Python code here."""
    hooks: dict[str, Any] = {"object_pairs_hook": _object, "parse_constant": lambda _: math.nan}
    try:
        return json.loads(text, **hooks)
    except json.JSONDecodeError:
        raise
    except ValueError:  # an integer of thousands of digits, on which Python spends no quadratic time
        return json.loads(text, **hooks, parse_int=lambda digits: math.inf if len(digits) > 20 else int(digits))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                fields[name] = _Twice(name)
            seen.add(name)
    return fields


def _check(root: dict[str, Any]) -> None:
    """Walk the tree without recursion, refusing what JSON's grammar lets through."""
    for name, value in root.items():
        _check_string(name, name)
        for path, leaf in _leaves(name, value):
            _check_leaf(name, path, leaf)


def _leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Every string, number and constant below a field, with its path; names of inner objects count as strings."""
    pending: list[tuple[str, object, int]] = [(name, value, 1)]
    while pending:
        path, node, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"{name} is nested more than {MAX_DEPTH} levels deep.", param=_ascii(name))
        if isinstance(node, dict):
            for key, item in node.items():
                yield path, key
                pending.append((f"{path}.{key}", item, depth + 1))
        elif isinstance(node, list):
            if _plain_integers(node):
                continue
            pending.extend((f"{path}[{index}]", item, depth + 1) for index, item in enumerate(node))
        else:
            yield path, node


def _plain_integers(node: list[Any]) -> bool:
    """True for a list of token ids, the one long thing a body holds besides text: nothing to find in it."""
    return set(map(type, node)) == {int} and _in_64_bits(min(node)) and _in_64_bits(max(node))


def _in_64_bits(value: int) -> bool:
    """Beyond these bounds an integer means nothing here."""
    return -(1 << 63) <= value < 1 << 64


def _check_leaf(name: str, path: str, leaf: object) -> None:
    if isinstance(leaf, _Twice):
        raise InvalidRequest(f"The field {_ascii(path)} is given twice.", param=_ascii(name))
    if (isinstance(leaf, float) and not math.isfinite(leaf)) or (isinstance(leaf, int) and not _in_64_bits(leaf)):
        raise InvalidRequest(f"{_ascii(path)} must be a finite number of at most 64 bits.", param=_ascii(name))
    if isinstance(leaf, str):
        _check_string(name, leaf)


def _check_string(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{_ascii(name)} holds a lone surrogate (half of a character) at position {error.start}.",
            param=_ascii(name),
        ) from None


def _ascii(text: str) -> str:
    """A field's name, as an error may carry it: any name can be sent, halves of characters included."""
    return text[:80].encode("ascii", "backslashreplace").decode()
