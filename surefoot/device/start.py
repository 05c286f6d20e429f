"""From a configuration to a device that runs steps: plan memory, load weights, warm up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from msgspec.structs import replace
from torch import Tensor

from surefoot import checkpoint as checkpoints
from surefoot import plan as planning
from surefoot.checkpoint import Checkpoint
from surefoot.config import EngineConfig, format_bytes
from surefoot.device import memory
from surefoot.device.executor import StepExecutor
from surefoot.device.kvcache import KVCache
from surefoot.device.runner import Runner
from surefoot.device.sampler import Sampler
from surefoot.errors import ConfigError, DoesNotFit, WorkerLost
from surefoot.faults import Faults
from surefoot.model import weights
from surefoot.model.foreign import ForeignNetwork
from surefoot.model.layers import Network
from surefoot.model.registry import network_class
from surefoot.spec import ModelSpec, read_spec
from surefoot.types import Executor, FailureKind, Limits, StepTime

Progress = Callable[[str, float], None]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Device:
    """An open device: what runs steps, and what it was fitted to."""

    executor: Executor
    limits: Limits
    plan: planning.MemoryPlan
    spec: ModelSpec


def open_device(config: EngineConfig, *, progress: Progress) -> Device:
    """Plan memory, load weights, warm up. `progress` hears what is being done and how much of it is (0 … 1).

    Raises ConfigError, ModelNotFound, CheckpointError or DoesNotFit.
    """
    faults = Faults.parse(config.faults, seed=config.seed) if config.allow_fault_injection else Faults()
    device = choose_device(config)
    found = checkpoints.find(config.model, weights=config.load_format != "dummy")
    spec = read_spec(found, config.model_impl)
    dtype = choose_dtype(config, spec, device)
    memory.settle_malloc()
    plan = planning.plan_memory(
        spec, config, memory.measure(device), device=device.type, dtype=str(dtype).removeprefix("torch.")
    )
    limits = _limits(plan, spec, device, config)
    # Positions end where the served context does: longrope turns by its length, and windows as long are none.
    spec = replace(spec, max_position=plan.max_model_len)

    began = time.perf_counter()

    def start() -> tuple[Executor, StepTime | None]:
        network = _network(found, spec, config, dtype, device, progress)
        log.info("weights loaded after %.1f s", time.perf_counter() - began)
        progress("warming up", 0.0)
        if device.type == "cuda":
            from surefoot.device.gpu_start import start_gpu  # Triton comes along, and is not there on every machine

            return start_gpu(spec, network, plan, limits, faults, device, progress)
        return _start_cpu(spec, network, plan, faults, device), None

    executor, step_time = _started(memory.guard(start), plan)
    return Device(executor, replace(limits, step_time=step_time), plan, spec)


def _start_cpu(
    spec: ModelSpec, network: Network, plan: planning.MemoryPlan, faults: Faults, device: torch.device
) -> Executor:
    dtype = getattr(torch, plan.dtype.split()[0])
    cache = KVCache(spec, num_blocks=plan.num_blocks, block_size=plan.block_size, dtype=dtype, device=device)
    executor = StepExecutor(Runner(spec, network, cache), Sampler(spec), plan, Faults())
    executor.warm_up()
    executor.faults = faults
    return executor


def _started(
    outcome: memory.Ok[tuple[Executor, StepTime | None]] | memory.Failure, plan: planning.MemoryPlan
) -> tuple[Executor, StepTime | None]:
    if isinstance(outcome, memory.Ok):
        return outcome.value
    if outcome.kind is FailureKind.OOM:
        raise DoesNotFit(
            f"Memory ran out while the model was loaded ({outcome.reason}); {format_bytes(outcome.free)} are free now. "
            f"Leave it more room, or give it less to fill with --memory. It was planned as:\n{plan}"
        )
    raise WorkerLost(f"The model could not be started.\n{outcome.trace}")


def _limits(plan: planning.MemoryPlan, spec: ModelSpec, device: torch.device, config: EngineConfig) -> Limits:
    return Limits(
        max_model_len=plan.max_model_len,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_num_seqs=plan.max_num_seqs,
        block_size=plan.block_size,
        num_blocks=plan.num_blocks,
        eos_token_ids=spec.eos_token_ids,
        depth=2 if device.type == "cuda" else 1,
        prefix_caching=config.enable_prefix_caching,
        max_step_seconds=config.max_step_ms / 1000,
    )


def _network(
    found: Checkpoint,
    spec: ModelSpec,
    config: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
) -> Network:
    if spec.implementation == "transformers":
        progress("loading weights", 0.0)
        dummy = config.load_format == "dummy"
        return ForeignNetwork.load(
            found.path, spec, device=device, dtype=dtype, quantization=config.quantization, dummy=dummy
        )
    tensors = _tensors(found, spec, config, dtype, device, progress)
    kind = network_class(spec.architecture)
    return kind.load(spec, tensors, device=device, dtype=dtype, quantization=config.quantization)


def _tensors(
    found: Checkpoint,
    spec: ModelSpec,
    config: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
) -> Iterator[tuple[str, Tensor]]:
    if config.load_format == "dummy":
        return weights.dummy(spec, dtype=dtype, device=device, seed=config.seed)

    def report(done: int, total: int, _: str) -> None:
        progress("loading weights", done / total)

    return weights.load(found, spec, dtype=dtype, device=device, progress=report)


def choose_device(config: EngineConfig) -> torch.device:
    """The device that is asked for; `auto` is the GPU where there is one. Raises ConfigError where it is not there."""
    there = torch.cuda.is_available()
    if config.device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device: {config.device!r} is none of auto, cpu, cuda.")
    if config.device == "cuda" and not there:
        raise ConfigError("device: cuda was asked for, but torch finds no CUDA device here.")
    if config.device == "cpu" or not there:
        return torch.device("cpu")
    if torch.cuda.get_device_capability() < (8, 0):
        name = torch.cuda.get_device_name()
        raise ConfigError(f"device: {name} is older than sm80, for which there are no kernels; use --device cpu.")
    return torch.device("cuda", torch.cuda.current_device())


def choose_dtype(config: EngineConfig, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """`auto` is what the device is fast at: on a GPU the checkpoint's 16 bits (bfloat16 for a float32 checkpoint); on a
    CPU float32, unless it multiplies the checkpoint's bfloat16 in hardware.

    Raises ConfigError for a name that is no dtype, and for weights of 8 bits that go with none here.
    """
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if config.dtype != "auto" and config.dtype not in names:
        raise ConfigError(f"dtype: {config.dtype!r} is none of auto, {', '.join(names)}.")
    dtype = names[config.dtype] if config.dtype != "auto" else _fast_dtype(config, spec, device)
    _check_quantization(config.quantization, dtype, device)
    return dtype


def _check_quantization(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ConfigError where there is no layer for weights of this kind."""
    if kind not in ("none", "int8", "fp8"):
        raise ConfigError(f"quantization: {kind!r} is none of none, int8, fp8.")
    if kind != "none" and device.type == "cpu" and (kind == "fp8" or dtype != torch.float32):
        raise ConfigError("quantization: on a CPU weights are int8, with dtype float32; fp8 is for GPUs.")
    if kind == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigError("quantization: fp8 needs a GPU of sm89 or later; int8 works on this one.")


def _fast_dtype(config: EngineConfig, spec: ModelSpec, device: torch.device) -> torch.dtype:
    if device.type == "cuda":
        return torch.float16 if spec.dtype == "float16" else torch.bfloat16
    native = spec.dtype == "bfloat16" and fast_bfloat16() and config.quantization == "none"
    return torch.bfloat16 if native else torch.float32


def fast_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (AVX512_BF16 or AMX); without, it is ten times slower."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
