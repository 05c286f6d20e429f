"""Strict reads of a checkpoint's own files: what is missing or of another type is an error that names file and key."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from surefoot.errors import CheckpointError

T = TypeVar("T")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object. Raises CheckpointError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: an object is needed, not {type(value).__name__}.")
    return value


class Reader:
    """Typed reads of a mapping: a missing key without a default, or a value of another type, names file and key."""

    def __init__(self, where: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.where = where
        self.values = values
        self._prefix = prefix

    def get(self, key: str, kind: type[T], *default: T) -> T:
        """The value of a key; null counts as absent. An int will do where a float is asked for."""
        value = self.values.get(key)
        if value is None:
            if not default:
                raise self.error(f"the key {self._prefix + key!r} is missing")
            return default[0]
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise self.error(f"{self._prefix}{key} is {value!r}; a value of type {kind.__name__} is needed")
        return value

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def size(self, key: str, *default: int) -> int:
        value = self.get(key, int, *default)
        if value <= 0:
            raise self.error(f"{self._prefix}{key} is {value}; a positive number is needed")
        return value

    def positive(self, key: str, *default: float) -> float:
        value = self.get(key, float, *default)
        if not (0 < value < math.inf):
            raise self.error(f"{self._prefix}{key} is {value}; a positive number is needed")
        return value

    def between(self, key: str, low: float, high: float) -> float | None:
        """A number from `low` to `high`, or None where there is none."""
        if not self.has(key):
            return None
        value = self.get(key, float)
        if not low <= value <= high:
            raise self.error(f"{self._prefix}{key} is {value}; a number from {low:g} to {high:g} is needed")
        return value

    def optional_size(self, key: str, default: int | None) -> int | None:
        """A size that may be switched off: by null, or, where `default` is None, by leaving it out."""
        if key not in self.values:
            return default
        return self.size(key) if self.has(key) else None

    def optional_positive(self, key: str, default: float | None) -> float | None:
        """As `optional_size`, for a float."""
        if key not in self.values:
            return default
        return self.positive(key) if self.has(key) else None

    def numbers(self, key: str, kind: type[T]) -> tuple[T, ...]:
        """A list of one type. An int will do where a float is asked for."""
        return tuple(Reader(self.where, {key: value}, self._prefix).get(key, kind) for value in self.get(key, list))

    def nested(self, key: str, *default: dict[str, Any]) -> Reader:
        """The object at a key, with errors that name both."""
        return Reader(self.where, self.get(key, dict, *default), f"{self._prefix}{key}.")

    def only(self, key: str, allowed: object, default: object) -> None:
        """Refuse a setting that changes the network into one that is not built here."""
        value = self.values.get(key, default)
        if value is not None and value != allowed:
            raise self.error(f"{self._prefix}{key} is {value!r}; only {allowed!r} is supported")

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id, a list of ids, or nothing."""
        value = self.values.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(token) is int and token >= 0 for token in ids):
            raise self.error(f"{self._prefix}{key} is {value!r}; a token id or a list of them is needed")
        return tuple(ids)

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {what}.")


# ---- vocabulary ------------------------------------------------------------------------------------------------------


def token_count(folder: Path) -> int | None:
    """One more than the largest id that the tokenizer of a directory knows; None where there is none to ask."""
    if (folder / "tokenizer.json").exists():
        return _counted(folder / "tokenizer.json", _ids_of_tokenizer_json)
    if (folder / "tokenizer.model").exists() and (folder / "tokenizer_config.json").exists():
        return _counted(folder / "tokenizer_config.json", _ids_of_added_tokens)
    return None


def _counted(path: Path, ids: Callable[[dict[str, Any]], list[int]]) -> int | None:
    values = read_json(path)
    try:
        return max(ids(values), default=-1) + 1 or None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: its vocabulary cannot be read: {error!r}") from error


def _ids_of_tokenizer_json(values: dict[str, Any]) -> list[int]:
    vocab = values["model"]["vocab"]
    ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
    return ids + [token["id"] for token in values.get("added_tokens", ())]


def _ids_of_added_tokens(values: dict[str, Any]) -> list[int]:
    """Of a vocabulary in tokenizer.model, whose special tokens come last and are written beside it."""
    if values.get("tokenizer_class") != "ChatGLM4Tokenizer":
        return []
    return [int(token) for token in values["added_tokens_decoder"]]
