"""vLLM's SamplingParams, of both of its eras, over ours.

Fields that our SamplingParams has too are passed on by name. `best_of`, beam search and other fields of 2024 are taken
at the values that ask for nothing; the same holds for what is newer than this engine.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self

from surefoot import grammar
from surefoot.errors import InvalidRequest
from surefoot.sampling import shown
from surefoot.types import Grammar
from surefoot.types import SamplingParams as Native


class BadRequest(InvalidRequest, ValueError):
    """What vLLM's callers catch as ValueError."""


class RequestOutputKind(enum.Enum):
    """What each output of a stream holds: all so far, what is new, or nothing before the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class StructuredOutputsParams:
    """What an output has to be: one of JSON by a schema, a regular expression, a choice, a grammar, any JSON object.

    Raises TypeError for a name that vLLM does not have, and BadRequest where none or several are given.
    """

    _KINDS: Final[Mapping[str, Callable[..., Grammar]]] = {
        "json": grammar.json_schema, "regex": grammar.regex, "choice": grammar.choice, "grammar": grammar.cfg,
    }  # fmt: skip
    _NEUTRAL: Final = (
        "disable_fallback", "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern",
        "structural_tag", "backend",
    )  # fmt: skip

    def __init__(self, *, json_object: bool | None = None, **fields: Any) -> None:
        for name, value in fields.items():
            if name not in self._KINDS and name not in self._NEUTRAL:
                raise TypeError(f"{type(self).__name__} has no field {name!r}.")
            if name in self._NEUTRAL and value not in (None, False, "auto"):
                raise BadRequest(f"{name}={shown(value)} cannot be honoured here; leave it out.", param=name)
        self._given = {name: fields[name] for name in self._KINDS if fields.get(name) is not None}
        self._json_object = bool(json_object)
        if len(self._given) + self._json_object != 1:
            raise BadRequest(f"Give one of {', '.join(self._KINDS)} and json_object.", param="structured_outputs")

    def made(self, field: str) -> Grammar:
        """As our engine takes it. Raises InvalidRequest naming `field`."""
        for name, value in self._given.items():
            return self._KINDS[name](value, field=field)
        return grammar.json_object(field=field)


GuidedDecodingParams = StructuredOutputsParams
"""Its name in 2024."""


_DEFAULTS: Final[Mapping[str, Any]] = {
    "n": 1, "best_of": None, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "stop": None, "stop_token_ids": None,
    "ignore_eos": False, "max_tokens": 16, "min_tokens": 0, "logprobs": None, "prompt_logprobs": None,
    "detokenize": True, "skip_special_tokens": True, "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False, "logit_bias": None, "output_kind": RequestOutputKind.CUMULATIVE,
    "truncate_prompt_tokens": None, "allowed_token_ids": None, "bad_words": None, "logits_processors": None,
    "structured_outputs": None, "guided_decoding": None, "logprob_token_ids": None, "flat_logprobs": False,
    "extra_args": None, "skip_reading_prefix_cache": None, "thinking_token_budget": None,
    "repetition_detection": None, "use_beam_search": False, "length_penalty": 1.0, "early_stopping": False,
}  # fmt: skip
_STRUCTURED: Final = ("structured_outputs", "guided_decoding")
_OURS: Final = (
    "best_of", "detokenize", "output_kind", "truncate_prompt_tokens", "top_k", "logit_bias", "seed", *_STRUCTURED
)  # fmt: skip
"""Fields that are seen to here rather than passed on."""
_NATIVE: Final = tuple(name for name in _DEFAULTS if name in Native.__struct_fields__ and name not in _OURS)
_NEUTRAL: Final[Mapping[str, Any]] = {
    name: default for name, default in _DEFAULTS.items() if name not in (*_NATIVE, *_OURS)
}  # fmt: skip
"""Fields that nothing here honours, at the value that asks for nothing; empty and None are as good."""
_IGNORED: Final = ("spaces_between_special_tokens", "skip_reading_prefix_cache", "flat_logprobs")
"""Fields that only other machinery has a use for: they change no text."""


class SamplingParams:
    """How to draw tokens: vLLM's names and defaults, attributes that may be set.

    Raises TypeError for a name that vLLM does not have, and BadRequest, a ValueError, for what cannot be honoured.
    Ranges are checked when the parameters are used.
    """

    n: int
    max_tokens: int | None
    temperature: float
    top_p: float
    stop_token_ids: Sequence[int] | None
    detokenize: bool
    truncate_prompt_tokens: int | None
    output_kind: RequestOutputKind

    def __init__(self, n: int = 1, best_of: int | None = None, **fields: Any) -> None:
        for name in fields:
            if name not in _DEFAULTS:
                raise TypeError(f"SamplingParams has no field {name!r}.")
        self.__dict__.update({**_DEFAULTS, **fields, "n": n, "best_of": best_of})
        self._check()

    def _check(self) -> None:
        if self.__dict__["best_of"] not in (None, self.n):
            raise BadRequest(
                f"best_of={shown(self.__dict__['best_of'])} cannot be honoured: every completion is returned. "
                f"Leave it out, or ask for n={shown(self.n)}.",
                param="best_of",
            )
        for name, neutral in _NEUTRAL.items():
            value = self.__dict__[name]
            if value is None or value == neutral or value in ([], {}, ()) or name in _IGNORED:
                continue
            raise BadRequest(f"{name}={shown(value)} cannot be honoured here; leave it out.", param=name)

    def native(self) -> Native:
        """The same for our engine. Raises BadRequest."""
        self._check()
        given = {name: self.__dict__[name] for name in _NATIVE}
        given |= {name: () for name, value in given.items() if value is None and name in _SEQUENCES}
        given["stop_token_ids"] = tuple(given["stop_token_ids"])
        seed, top_k, bias = (self.__dict__[name] for name in ("seed", "top_k", "logit_bias"))
        return Native(
            **given,
            seed=None if seed == -1 else seed,
            top_k=0 if top_k is None else top_k,
            logit_bias=tuple(bias.items() if isinstance(bias, Mapping) else bias or ()),
            grammar=self._grammar(),
        )

    def _grammar(self) -> Grammar | None:
        for name in _STRUCTURED:
            wanted = self.__dict__[name]
            if wanted is not None:
                if not isinstance(wanted, StructuredOutputsParams):
                    raise BadRequest(f"{name} must be StructuredOutputsParams, got {shown(wanted)}.", param=name)
                return wanted.made(name)
        return None

    def clone(self) -> Self:
        """A copy that may be changed."""
        return copy.copy(self)

    @classmethod
    def from_optional(cls, **fields: Any) -> Self:
        """As the constructor; None stands for the default."""
        return cls(**{name: value for name, value in fields.items() if value is not None})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SamplingParams) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items() if value != _DEFAULTS[name])
        return f"SamplingParams({given})"


_SEQUENCES: Final = ("stop", "stop_token_ids", "bad_words")
