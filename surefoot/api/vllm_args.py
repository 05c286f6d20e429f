"""vLLM's engine arguments, of both of its eras, over our settings."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from typing import Any, Final, Self

from surefoot.api import settings, vllm_flags
from surefoot.bridge.policy import Policy
from surefoot.checkpoint import EMBEDDED
from surefoot.config import EngineConfig, ServerConfig
from surefoot.errors import ConfigError

log = logging.getLogger(__name__)

_SERVER: Final = ("max_queued_requests", "max_queued_tokens", "max_restarts", "restart_window")
_MOOT: Final = {"served_model_name": None, "generation_config": "auto"}
"""Settings of our server that a program has no use for."""
_told: set[str] = set()
"""Notes are told once for a process."""


def _defaults() -> Mapping[str, Any]:
    """Every argument, with vLLM's default; None where ours is fitted to the device."""
    ours = {name: getattr(EngineConfig(), name) for name in settings.ENGINE if name != "model"}
    theirs = {name: entry.default for name, entry in vllm_flags.TABLE.items()}
    server = dict.fromkeys((*_SERVER, *(old for old, new in vllm_flags.RENAMED.items() if new in _SERVER)))
    return {**theirs, **server, **_MOOT, **ours, "log_level": "warning", "quantization": None}


class EngineArgs:
    """What an engine is made from: vLLM's names, and the settings of `surefoot serve`, as attributes that may be set.

    Raises TypeError for a name that neither has. Values are judged when an engine is made, see `config`.
    """

    model: str

    def __init__(self, model: str = EMBEDDED, **options: Any) -> None:
        defaults = _defaults()
        for name in options:
            if name not in defaults:
                close = difflib.get_close_matches(name, defaults, n=1)
                hint = f" Did you mean {close[0]}?" if close else ""
                raise TypeError(f"{type(self).__name__} has no argument {name!r}.{hint}")
        self.__dict__.update(model=model, **{**defaults, **options})

    def config(self) -> EngineConfig:
        """Our settings. Raises ConfigError for a value that is wrong, or that cannot be honoured."""
        own: dict[str, Any] = {"model": str(self.model)}
        for name, value in self.__dict__.items():
            if name in settings.ENGINE:
                own[name] = str(value) if name == "dtype" else value
            elif name in vllm_flags.TABLE and not (name == "tokenizer" and value == self.model):
                note = vllm_flags.judge(name, value, name)
                if note is not None and note not in _told:
                    _told.add(note)
                    log.warning("%s", note)
        return settings.engine_config(own)

    def policy(self) -> Policy:
        """How many requests may wait, without bound unless one is given, and how often a worker is replaced."""
        server = ServerConfig()
        given = {
            vllm_flags.RENAMED.get(name, name): value for name, value in self.__dict__.items() if value is not None
        }
        unbounded = {"max_queued_requests": 1 << 62, "max_queued_tokens": 1 << 62}
        chosen = {name: given.get(name, unbounded.get(name, getattr(server, name))) for name in _SERVER}
        for name, value in chosen.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
                raise ConfigError(f"{name}: {value!r} is not a number of at least 0.")
        return Policy(**chosen)

    @classmethod
    def from_cli_args(cls, args: Any) -> Self:
        """From an argparse namespace that has some of the names; others are the program's own."""
        known = {"model": None, **_defaults()}
        return cls(**{name: value for name, value in vars(args).items() if name in known and value is not None})

    @staticmethod
    def add_cli_args(parser: Any) -> Any:
        """Give an argparse parser an option for each argument, and return it."""
        from argparse import BooleanOptionalAction

        for name, default in {"model": EMBEDDED, **_defaults()}.items():
            flag = "--" + name.replace("_", "-")
            if isinstance(default, bool):
                parser.add_argument(flag, action=BooleanOptionalAction, default=default)
            else:
                parser.add_argument(flag, default=default)
        return parser

    def __repr__(self) -> str:
        defaults = _defaults()
        given = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items() if value != defaults.get(name))
        return f"{type(self).__name__}({given})"


class AsyncEngineArgs(EngineArgs):
    """The same, for AsyncLLMEngine."""
