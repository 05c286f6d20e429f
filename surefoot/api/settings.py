"""Every setting by name: how its text is read, and where it may come from.

A flag beats the environment (`SUREFOOT_PORT` for `--port`), which beats the YAML file of `--config`, which beats the
default. A name that no setting has is an error wherever it stands: a mistyped setting must not become the default.
Settings that vLLM has and we do not are known by `vllm_flags`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from surefoot.api import vllm_flags
from surefoot.config import EngineConfig, ServerConfig, parse_bytes, parse_tokens
from surefoot.errors import ConfigError

PREFIX = "SUREFOOT_"
CONFIG = "config"
VLLM_KEY = "VLLM_API_KEY"


class Setting(NamedTuple):
    """`read(text, name)` makes the value, or raises ConfigError under that name; `many` takes a list of texts."""

    read: Callable[[str, str], Any]
    many: bool = False


def _text(text: str, name: str) -> str:
    if not text:
        raise ConfigError(f"{name}: is empty. Give a value, or leave the setting out.")
    return text


def _any_text(text: str, name: str) -> str:
    return text


def _template(text: str, name: str) -> str:
    """Jinja itself, which has braces, or the path of a file that holds some."""
    if "{{" in text or "{%" in text:
        return text
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: {text} is neither Jinja nor a file that can be read: {error}") from error


def _bytes(text: str, name: str) -> int:
    return parse_bytes(text, name=name)


def _tokens(text: str, name: str) -> int:
    return parse_tokens(text, name=name)


def _choice(*choices: str) -> Callable[[str, str], str]:
    def read(text: str, name: str) -> str:
        if text not in choices:
            raise ConfigError(f"{name}: {text!r} is not one of {', '.join(choices)}.")
        return text

    return read


def _whole(low: int, high: int) -> Callable[[str, str], int]:
    def read(text: str, name: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ConfigError(f"{name}: {text!r} is not a whole number.") from None
        if not low <= value <= high:
            raise ConfigError(f"{name}: {value} is not in {low:,} … {high:,}.")
        return value

    return read


def _real(low: float, high: float) -> Callable[[str, str], float]:
    def read(text: str, name: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ConfigError(f"{name}: {text!r} is not a number.") from None
        if not low <= value <= high:  # false for NaN too
            raise ConfigError(f"{name}: {text} is not in {low:g} … {high:g}.")
        return value

    return read


def _flag(text: str, name: str) -> bool:
    values = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    if text.lower() not in values:
        raise ConfigError(f"{name}: {text!r} is neither true nor false.")
    return values[text.lower()]


_log_level = Setting(_choice("debug", "info", "warning", "error", "critical"))
ENGINE: dict[str, Setting] = {
    "model": Setting(_text),
    "dtype": Setting(_choice("auto", "float32", "bfloat16", "float16")),
    "device": Setting(_choice("auto", "cpu", "cuda")),
    "quantization": Setting(_choice("none", "int8", "fp8")),
    "model_impl": Setting(_choice("auto", "surefoot", "transformers")),
    "load_format": Setting(_choice("auto", "dummy")),
    "trust_remote_code": Setting(_flag),
    "max_model_len": Setting(_tokens),
    "max_num_batched_tokens": Setting(_tokens),
    "max_num_seqs": Setting(_whole(1, 65_536)),
    "block_size": Setting(_whole(1, 1_024)),
    "memory": Setting(_bytes),
    "gpu_memory_utilization": Setting(_real(0.01, 1.0)),
    "max_step_ms": Setting(_real(1.0, 60_000.0)),
    "idle_release": Setting(_real(0.0, 31_536_000.0)),
    "enable_prefix_caching": Setting(_flag),
    "seed": Setting(_whole(0, 2**63 - 1)),
    "allow_fault_injection": Setting(_flag),
    "faults": Setting(_any_text),
    "log_level": _log_level,
}
SERVER: dict[str, Setting] = {
    "host": Setting(_text),
    "port": Setting(_whole(0, 65_535)),
    "served_model_name": Setting(_text, many=True),
    "api_key": Setting(_text, many=True),
    "admin_api_key": Setting(_text, many=True),
    "generation_config": Setting(_choice("auto", "none")),
    "chat_template": Setting(_template),
    "tool_call_parser": Setting(_choice("auto", "none", "glm4", "mistral", "hermes", "llama3_json")),
    "reasoning_parser": Setting(_choice("auto", "none", "think", "deepseek_r1", "qwen3")),
    "drain_timeout": Setting(_real(0.0, 86_400.0)),
    "max_queued_requests": Setting(_whole(1, 1 << 20)),
    "max_queued_tokens": Setting(_tokens),
    "max_body_bytes": Setting(_bytes),
    "request_timeout": Setting(_real(0.001, 86_400.0)),
    "first_token_timeout": Setting(_real(0.001, 86_400.0)),
    "max_restarts": Setting(_whole(0, 1 << 20)),
    "restart_window": Setting(_real(1.0, 86_400.0)),
    "incident_dir": Setting(_text),
    "while_restarting": Setting(_choice("wait", "refuse")),
    "sleep_after": Setting(_real(0.0, 31_536_000.0)),
    "while_sleeping": Setting(_choice("wake", "refuse")),
    "log_level": _log_level,
}
SETTINGS = ENGINE | SERVER


Note = Callable[[str], None]
"""Told of each setting that was accepted and changes nothing."""


def resolve(
    flags: Mapping[str, Any], environ: Mapping[str, str], note: Note = lambda text: None
) -> tuple[EngineConfig, ServerConfig]:
    """Merge the sources. `flags` holds settings by name, None where not given, and maybe "config", a YAML file's path.

    Raises ConfigError naming the flag, variable or key at fault.
    """
    given = {name: value for name, value in flags.items() if value is not None and value != []}
    variables = _variables(environ)
    path = given.pop(CONFIG, None) or variables.pop(CONFIG, None)
    values: dict[str, Any] = {}
    if key := environ.get(VLLM_KEY):  # whoever sets it counts on a guarded server
        values["api_key"] = _read("api_key", key, VLLM_KEY)
    if path is not None:
        values |= _file(Path(path), note)
    values |= {name: _read(name, _split(name, text), PREFIX + name.upper()) for name, text in variables.items()}
    for name, value in given.items():
        values |= _setting(name, value, "--" + name.replace("_", "-"), note)
    return (
        EngineConfig(**{name: value for name, value in values.items() if name in ENGINE}),
        ServerConfig(**{name: value for name, value in values.items() if name in SERVER}),
    )


def engine_config(options: Mapping[str, Any]) -> EngineConfig:
    """Keyword options of `LLM` → EngineConfig; None means the default. Raises ConfigError for unknown or bad ones."""
    for name in options:
        if name not in ENGINE:
            raise ConfigError(f"LLM has no option {name!r}.{_hint(name, ENGINE)}")
    return EngineConfig(**{name: _read(name, value, name) for name, value in options.items() if value is not None})


def _setting(name: str, value: Any, source: str, note: Note) -> dict[str, Any]:
    """What a setting of ours, or of vLLM's, comes to under our name; nothing where it has no consequence."""
    name = vllm_flags.RENAMED.get(name, name)
    if name in SETTINGS:
        return {name: _read(name, value, source)}
    text = vllm_flags.judge(name, value, source)
    if text is not None:
        note(text)
    return {}


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for variable, text in environ.items():
        if variable.startswith(PREFIX):
            name = variable.removeprefix(PREFIX).lower()
            if name not in SETTINGS and name != CONFIG:
                known = [PREFIX + other.upper() for other in (*SETTINGS, CONFIG)]
                raise ConfigError(f"{variable}: there is no such setting.{_hint(variable, known)}")
            found[name] = text
    return found


def _split(name: str, text: str) -> str | list[str]:
    """A variable holds a list as texts with commas between."""
    return [part.strip() for part in text.split(",")] if SETTINGS[name].many else text


def _file(path: Path, note: Note) -> dict[str, Any]:
    import yaml  # only where a file is given

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: is not YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: must hold settings, one `name: value` a line.")
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in SETTINGS and name not in vllm_flags.TABLE and name not in vllm_flags.RENAMED:
            raise ConfigError(f"{path}: there is no setting {key!r}.{_hint(name, SETTINGS)}")
        if value is not None:
            values |= _setting(name, value, f"{path}: {key}", note)
    return values


def _read(name: str, value: Any, source: str) -> Any:
    """One setting's value from text, or from the plain value that YAML or a caller gave."""
    setting = SETTINGS[name]
    if name in vllm_flags.SPELLINGS:
        value = vllm_flags.SPELLINGS[name].get(str(value), value)
    if value is None:
        return None
    if setting.many:
        items = list(value) if isinstance(value, list | tuple) else [value]
        return tuple(setting.read(_plain(item, source), source) for item in items)
    return setting.read(_plain(value, source), source)


def _plain(value: Any, source: str) -> str:
    if not isinstance(value, str | int | float):
        raise ConfigError(f"{source}: a plain value is wanted, not {value!r}.")
    return str(value)


def _hint(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=3)
    return f" Did you mean {' or '.join(close)}?" if close else " `surefoot serve --help` lists all of them."
