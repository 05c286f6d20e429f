"""config.json of an architecture that `transformers` computes (`--model-impl transformers`) → ModelSpec.

Its network is known to transformers alone. What is read here is what memory and cache are planned by, under the names
that configurations have for it; `model.foreign` compares it with what the network asks for before anything is served.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from surefoot.architecture import ModelSpec
from surefoot.errors import CheckpointError
from surefoot.families import Fields, architecture, completed
from surefoot.reading import Reader, read_json

_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")
_BY_LENGTH = ("longrope", "su")
"""Rotary embeddings that transformers chooses by the longest text of a batch."""


def read_generic(folder: Path) -> ModelSpec:
    """The spec of a directory whose network transformers computes. Raises CheckpointError naming file and key."""
    config = Reader(folder / "config.json", read_json(folder / "config.json"))
    config.only("quantization_config", None, None)
    config.only("is_encoder_decoder", False, False)
    if kinds := [kind for kind in _strings(config.values) if kind in _BY_LENGTH]:
        raise config.error(f"rope scaling {kinds[0]!r} follows the longest text of a batch in transformers")
    hidden, heads = _size(config, "hidden_size", "n_embd", "d_model"), _size(config, "num_attention_heads", "n_head")
    layers = _size(config, "num_hidden_layers", "n_layer")
    fields: Fields = {
        "architecture": architecture(config),
        "implementation": "transformers",
        "vocab_size": config.size("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": _size(config, "intermediate_size", "ffn_dim", "n_inner", default=4 * hidden),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": _size(config, "num_key_value_heads", default=heads),
        "head_dim": _size(config, "head_dim", default=hidden // heads),
        "max_position": _size(config, *_LENGTHS),
        "rms_norm_eps": 1.0,
        "rope_theta": 1.0,
        "tie_word_embeddings": config.get("tie_word_embeddings", bool, True),
        "attention_bias": False,
        "stored_parameters": stored_parameters(folder),
    }
    return completed(folder, config, fields | _windows(config, layers), ())


def _size(config: Reader, *names: str, default: int | None = None) -> int:
    """The first of `names` that is there."""
    for name in names:
        if config.has(name):
            return config.size(name)
    if default is None:
        raise config.error(f"none of {', '.join(names)} is there")
    return default


def _windows(config: Reader, layers: int) -> Fields:
    window = config.optional_size("sliding_window", None)
    if window is None or not config.get("use_sliding_window", bool, True):
        return {}
    kinds = config.get("layer_types", list, ["sliding_attention"] * layers)
    local = tuple(at for at, kind in enumerate(kinds) if kind == "sliding_attention")
    return {"sliding_window": window, "window_layers": local} if local else {}


def _strings(value: Any) -> Iterator[str]:
    """Every string in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def stored_parameters(folder: Path) -> int | None:
    """Numbers in the *.safetensors of a directory, by their headers; None where there are none."""
    files = sorted(folder.glob("*.safetensors"))
    return sum(map(_numbers_in, files)) if files else None


def _numbers_in(path: Path) -> int:
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, path.stat().st_size)))
        return sum(math.prod(about["shape"]) for name, about in header.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: truncated or not a safetensors file ({error}); fetch it again.") from error
