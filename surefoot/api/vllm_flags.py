"""vLLM's settings that are none of ours: what is said to whoever gives one, on the command line, in a file or in code.

renamed    ours has another name and the same meaning
moot       any value will do, since what it turns is not here or turns by itself: accepted, and told in the log
only       some values ask for what happens here anyway; any other is refused with the reason
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from surefoot.errors import ConfigError


class Moot(NamedTuple):
    """Without consequence here, because of `why`."""

    default: Any
    why: str


class Only(NamedTuple):
    """Refused, because of `why`, but for None, vLLM's `default` and what is `fine` too."""

    default: Any
    why: str
    fine: tuple[Any, ...] = ()


RENAMED: Final = {
    "max_num_queued_reqs": "max_queued_requests",
    "max_num_queued_tokens": "max_queued_tokens",
    "shutdown_timeout": "drain_timeout",
}
SPELLINGS: Final[Mapping[str, Mapping[str, str | None]]] = {
    "dtype": {"half": "float16", "float": "float32", "torch.float16": "float16", "torch.bfloat16": "bfloat16",
              "torch.float32": "float32"},
    "load_format": {"safetensors": "auto", "hf": "auto", "gguf": "auto"},
    "model_impl": {"vllm": "surefoot"},
    "quantization": dict.fromkeys(("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors"), None),
    "max_model_len": {"-1": None, "auto": None},
    "generation_config": {"vllm": "none"},
}  # fmt: skip
"""Values of settings that we share, in vLLM's words; None is the default."""
SHORT: Final = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-O": "optimization_level",
}

_ONE_DEVICE = "one device serves a model; start a server for each device"
_NO_LORA = "adapters are not served; merge them into the checkpoint"
_NO_SPECULATION = "there is no speculative decoding"
_LOCAL = "models are directories of this machine; nothing is downloaded"
_AS_IT_IS = "a checkpoint is served as its config.json describes it"
_NO_OFFLOAD = "weights and KV cache stay on the device; preempted requests are computed again"
_NOT_LOGGED = "prompts and answers are never logged"
_NO_CORS = "browsers of other origins are not answered"
_NO_TLS = "the server speaks plain HTTP; put a proxy before it"
_GRAPHS = "CUDA graphs are part of the memory plan, and nothing else is compiled"
_NO_RAY = "the worker is one process of this machine"
_HEADS = "heads of requests are bounded already"

TABLE: Final[Mapping[str, Moot | Only]] = {
    # the model
    "tokenizer": Only(None, "the tokenizer is the checkpoint's own"),
    "tokenizer_mode": Only("auto", "tokenizers are read by one reader", ("hf", "slow")),
    "skip_tokenizer_init": Only(False, "texts need the tokenizer"),
    "revision": Only(None, _LOCAL, ("main",)),
    "code_revision": Only(None, _LOCAL, ("main",)),
    "tokenizer_revision": Only(None, _LOCAL, ("main",)),
    "download_dir": Moot(None, _LOCAL),
    "hf_overrides": Only(None, _AS_IT_IS, ({},)),
    "hf_config_path": Only(None, _AS_IT_IS),
    "rope_scaling": Only(None, _AS_IT_IS, ({},)),
    "rope_theta": Only(None, _AS_IT_IS),
    "kv_cache_dtype": Only("auto", "keys and values have the model's type"),
    "override_generation_config": Only(None, "defaults come from generation_config.json; edit that", ({},)),
    "limit_mm_per_prompt": Moot(None, "models here read text alone"),
    "enable_lora": Only(False, _NO_LORA),
    "lora_modules": Only(None, _NO_LORA, ([],)),
    "max_loras": Moot(1, _NO_LORA),
    "max_lora_rank": Moot(16, _NO_LORA),
    "max_cpu_loras": Moot(None, _NO_LORA),
    "speculative_config": Only(None, _NO_SPECULATION, ({},)),
    "speculative_model": Only(None, _NO_SPECULATION),
    "num_speculative_tokens": Only(None, _NO_SPECULATION),
    # devices
    "tensor_parallel_size": Only(1, _ONE_DEVICE),
    "pipeline_parallel_size": Only(1, _ONE_DEVICE),
    "data_parallel_size": Only(1, _ONE_DEVICE),
    "enable_expert_parallel": Only(False, _ONE_DEVICE),
    "distributed_executor_backend": Only(None, _NO_RAY, ("mp", "uni")),
    "worker_use_ray": Only(False, _NO_RAY),
    "engine_use_ray": Only(False, _NO_RAY),
    "disable_custom_all_reduce": Moot(False, _ONE_DEVICE),
    "max_parallel_loading_workers": Moot(None, "weights are mapped, not copied"),
    # memory and batching
    "kv_cache_memory_bytes": Only(None, "the KV cache gets what --memory leaves; give that"),
    "num_gpu_blocks_override": Only(None, "the KV cache gets what --memory leaves; give that"),
    "cpu_offload_gb": Only(0, _NO_OFFLOAD),
    "kv_offloading_size": Only(None, _NO_OFFLOAD),
    "kv_offloading_backend": Moot("native", _NO_OFFLOAD),
    "swap_space": Moot(4, _NO_OFFLOAD),
    "enable_chunked_prefill": Moot(True, "prompts are always computed in chunks, which changes no text"),
    "scheduler_delay_factor": Moot(0.0, "a step takes whatever fits into it"),
    "scheduler_reserve_full_isl": Moot(True, "admission counts on the whole prompt"),
    "preemption_mode": Only(None, _NO_OFFLOAD, ("recompute",)),
    "async_scheduling": Moot(None, "the next step is planned while one runs"),
    "stream_interval": Only(1, "every token is sent when it is there"),
    "use_v2_block_manager": Moot(True, "there is one kind of blocks"),
    "num_lookahead_slots": Moot(0, _NO_SPECULATION),
    "enforce_eager": Moot(False, _GRAPHS),
    "optimization_level": Moot(2, _GRAPHS),
    "compilation_config": Moot(None, _GRAPHS),
    "max_seq_len_to_capture": Moot(8192, _GRAPHS),
    "max_context_len_to_capture": Moot(None, _GRAPHS),
    "scheduling_policy": Only("fcfs", "requests are served in the order of arrival", ("priority",)),
    "enable_sleep_mode": Moot(False, "any server can sleep: POST /sleep, with an admin key"),
    # the API
    "max_logprobs": Only(20, "requests may ask for 20"),
    "chat_template_content_format": Only("auto", "parts of text are joined for the template", ("string",)),
    "default_chat_template_kwargs": Only(None, "a request has chat_template_kwargs of its own", ({},)),
    "response_role": Only("assistant", "answers come from the assistant"),
    "enable_auto_tool_choice": Moot(False, "a request with tools may always be answered with a call"),
    "guided_decoding_backend": Moot("auto", "there is one grammar engine"),
    "structured_outputs_config": Moot(None, "there is one grammar engine"),
    "enable_prompt_tokens_details": Moot(False, "cached tokens are always told"),
    "enable_force_include_usage": Only(False, "a stream tells its usage to who asks, with stream_options"),
    "enable_request_id_headers": Only(False, "X-Request-Id is not sent"),
    "enable_server_load_tracking": Moot(False, "/metrics tells the load"),
    "disable_frontend_multiprocessing": Moot(False, "the engine is always a process of its own"),
    "root_path": Only("", "routes stand where they stand; rewrite paths in the proxy"),
    "middleware": Only(None, "no code is loaded into the server", ([],)),
    "uds": Only(None, "the server listens on TCP"),
    "disable_fastapi_docs": Only(False, "/docs is always there"),
    "allow_credentials": Only(False, _NO_CORS),
    "allowed_origins": Only(None, _NO_CORS, ([],)),
    "allowed_methods": Moot(["*"], _NO_CORS),
    "allowed_headers": Moot(["*"], _NO_CORS),
    "h11_max_incomplete_event_size": Moot(None, _HEADS),
    "h11_max_header_count": Moot(None, _HEADS),
    "ssl_keyfile": Only(None, _NO_TLS),
    "ssl_certfile": Only(None, _NO_TLS),
    "ssl_ca_certs": Only(None, _NO_TLS),
    "ssl_cert_reqs": Only(0, _NO_TLS),
    "ssl_ciphers": Only(None, _NO_TLS),
    "enable_ssl_refresh": Only(False, "certificates are read at start"),
    # logs and numbers
    "disable_log_requests": Moot(False, _NOT_LOGGED),
    "enable_log_requests": Only(False, _NOT_LOGGED),
    "enable_log_outputs": Only(False, _NOT_LOGGED),
    "max_log_len": Moot(None, _NOT_LOGGED),
    "disable_log_stats": Moot(False, "/metrics tells the numbers, not the log"),
    "uvicorn_log_level": Moot("info", "--log-level is for all"),
    "disable_uvicorn_access_log": Moot(False, "requests are logged at --log-level debug only"),
    "disable_access_log_for_endpoints": Moot(None, "requests are logged at --log-level debug only"),
    "log_config_file": Only(None, "logs have one form; --log-level says how much"),
    "otlp_traces_endpoint": Only(None, "traces are not sent"),
    "collect_detailed_traces": Only(None, "traces are not sent"),
    "kv_cache_metrics": Moot(False, "/metrics has them"),
    "show_hidden_metrics_for_version": Moot(None, "no metric is hidden"),
}


def judge(name: str, value: Any, source: str) -> str | None:
    """What there is to say in the log about a setting of TABLE. Raises ConfigError where it cannot be honoured."""
    entry = TABLE[name]
    given = _parsed(value)
    if given is None or given == entry.default:
        return None
    if isinstance(entry, Moot):
        return f"{source} changes nothing here: {entry.why}."
    if given in entry.fine:
        return None
    raise ConfigError(f"{source}: {value} cannot be honoured here: {entry.why}.")


def _parsed(value: Any) -> Any:
    """Flags are texts; `1`, `true`, `{}` and such mean what they mean in JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value.lower() if value in ("True", "False", "None") else value)
    except ValueError:
        return value


def split(arguments: Sequence[str], own: Mapping[str, bool]) -> tuple[list[str], dict[str, Any]]:
    """Arguments of `surefoot serve` → those that the command knows, and vLLM's others by name.

    `own` tells of each setting that is ours whether it takes several values, which vLLM writes one after the other.
    """
    rest: list[str] = []
    foreign: dict[str, Any] = {}
    pending = list(arguments)
    named = len(pending) > 1 and not pending[1].startswith(
        "-"
    )  # the model stands first: what follows a flag is its own
    while pending:
        argument = pending.pop(0)
        name, value, switch = _read(argument)
        if argument == "--":
            return [*rest, argument, *pending], foreign
        if name == "model" and argument.startswith("--"):
            rest.append(value if value is not None else _next(argument, pending))
            named = True
        elif name in own or (name not in TABLE and name not in RENAMED):
            rest.append(argument)
            while named and own.get(name) and value is None and _several(pending):
                rest += [pending.pop(0), argument]
        elif switch is not None and value is None:
            foreign[name] = switch
        else:
            foreign[name] = value if value is not None else _next(argument, pending)
    return rest, foreign


def _several(pending: Sequence[str]) -> bool:
    """Two values follow, so that the flag has to be said again between them."""
    return len(pending) > 1 and not pending[0].startswith("-") and not pending[1].startswith("-")


def _read(argument: str) -> tuple[str, str | None, bool | None]:
    """Name and value of a flag, and what a switch is set to; for anything else a name that nothing has."""
    flag, equals, text = argument.partition("=")
    value = text if equals else None
    if flag.startswith("-O") and flag[2:].isdecimal():
        return SHORT["-O"], flag[2:], None
    if flag in SHORT:
        return SHORT[flag], value, None
    if not flag.startswith("--"):
        return "", None, None
    name = flag[2:].replace("-", "_")
    if name.startswith("no_") and _is_switch(name[3:]):
        return name[3:], None, False
    return name, value, True if _is_switch(name) else None


def _is_switch(name: str) -> bool:
    entry = TABLE.get(name)
    return entry is not None and (isinstance(entry.default, bool) or name == "async_scheduling")


def _next(argument: str, pending: list[str]) -> str:
    if not pending or pending[0].startswith("--"):
        raise ConfigError(f"{argument}: a value is missing.")
    return pending.pop(0)
