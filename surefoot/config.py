"""Settings, read once. Names are vLLM's where it has them; `cli` fills them from flags, environment and YAML."""

from __future__ import annotations

import re

from surefoot.errors import ConfigError
from surefoot.types import Value

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_UNITS = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "kib": KIB, "m": 10**6, "mb": 10**6, "mib": MIB,
          "g": 10**9, "gb": 10**9, "gib": GIB}  # fmt: skip


def parse_bytes(text: str, *, name: str) -> int:
    """`"2GiB"`, `"500 MB"`, `"1073741824"` → bytes. Raises ConfigError naming the setting."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{name}: {text!r} is not a size. Write bytes or a unit, such as 2GiB, 512MiB or 4GB.")
    return int(float(match[1]) * unit)


def parse_tokens(text: str, *, name: str) -> int:
    """`"4096"`, `"128k"` (131,072), `"32K"` (32,768) → tokens. Raises ConfigError naming the setting.

    Contexts are powers of two: vLLM reads a small k as 1,000, and whoever writes 128k means a model's 131,072.
    """
    match = re.fullmatch(r"\s*(\d+)\s*([kK]?)\s*", text)
    if match is None or int(match[1]) == 0:
        raise ConfigError(f"{name}: {text!r} is not a number of tokens. Write a count such as 4096, 128k or 32K.")
    return int(match[1]) * (1024 if match[2] else 1)


def format_bytes(count: float) -> str:
    """Bytes for a reader: `1.50 GiB`, `320.0 MiB`, `12 KiB`, `512 B`."""
    if abs(count) >= GIB:
        return f"{count / GIB:.2f} GiB"
    if abs(count) >= MIB:
        return f"{count / MIB:.1f} MiB"
    return f"{count / KIB:.0f} KiB" if abs(count) >= KIB else f"{count:.0f} B"


class EngineConfig(Value, frozen=True, kw_only=True):
    """What the worker needs to know. `None` means: fit it to the device (see `plan.plan_memory`)."""

    model: str = "smollm2"
    dtype: str = "auto"
    """auto | float32 | bfloat16 | float16"""
    device: str = "auto"
    """auto | cpu | cuda"""
    quantization: str = "none"
    """none | int8 | fp8 (GPUs only): what linear layers hold their weights in"""
    model_impl: str = "auto"
    """auto (ours, else transformers') | surefoot | transformers: whose code computes the network"""
    load_format: str = "auto"
    """auto | dummy (random weights: shapes without a checkpoint)"""
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    block_size: int | None = None
    memory: int | None = None
    """Bytes for weights + activations + KV cache."""
    gpu_memory_utilization: float | None = None
    max_step_ms: float = 100.0
    """How long a step may take on a GPU while another request waits for its next token."""
    idle_release: float | None = None
    """Seconds without work after which the memory of the KV cache is given back until the next request."""
    enable_prefix_caching: bool = True
    trust_remote_code: bool = False
    """Accepted for the sake of scripts that pass it: no code of a checkpoint is ever run."""
    seed: int = 0
    allow_fault_injection: bool = False
    faults: str = ""
    """Text of SUREFOOT_FAULTS, obeyed only with `allow_fault_injection`."""
    log_level: str = "info"


class ServerConfig(Value, frozen=True, kw_only=True):
    """What the HTTP side needs to know."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] = ()
    api_key: tuple[str, ...] = ()
    admin_api_key: tuple[str, ...] = ()
    """Keys of those who may change the server, such as /drain does; without one nobody may."""
    generation_config: str = "auto"
    """auto (requests start from the model's generation_config.json) | none (from vLLM's defaults)"""
    chat_template: str | None = None
    """Jinja source to use instead of the checkpoint's own."""
    tool_call_parser: str = "auto"
    """auto (what the chat template tells) | none | a name out of `api.dialects`"""
    reasoning_parser: str = "auto"
    """auto (what the chat template tells) | none | a name out of `api.reasoning`"""
    drain_timeout: float = 30.0
    """Seconds that SIGTERM waits for running requests."""
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1 << 20
    max_body_bytes: int = 16 * MIB
    request_timeout: float | None = None
    """Seconds that a request may take to its end; it may ask for less, as `timeout`."""
    first_token_timeout: float | None = None
    """Seconds that a request may take to its first token."""
    max_restarts: int = 20
    """Workers that are replaced within `restart_window` seconds before the server ends."""
    restart_window: float = 300.0
    incident_dir: str | None = None
    """Folder for a record of each worker's death; without prompts and texts."""
    while_restarting: str = "wait"
    """wait (new requests wait for the next worker) | refuse (they get a 503)"""
    sleep_after: float | None = None
    """Seconds without requests after which the worker is ended, and all its memory goes back, until there is one."""
    while_sleeping: str = "wake"
    """wake (a request starts the worker again, and waits for it) | refuse (it gets a 503)"""
    log_level: str = "info"
