"""`surefoot plan`: what a model takes on a card that need not be here, before anything is loaded.

It is the plan that the engine itself makes at start (`plan.plan_memory`), fed with numbers that are given instead of
measured. Of the model it reads config.json alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import msgspec
import psutil
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from surefoot import checkpoint
from surefoot.api import settings
from surefoot.config import EngineConfig, format_bytes, parse_bytes
from surefoot.errors import ConfigError, DoesNotFit
from surefoot.plan import MachineMemory, MemoryPlan, overheads, plan_memory, title
from surefoot.spec import ModelSpec, read_spec
from surefoot.types import Value

TYPICAL = 2048
"""Tokens of a typical sequence, prompt and answer."""


class Machine(Value, frozen=True, kw_only=True):
    """Where the model is to run; sizes in bytes."""

    device: str
    """cpu | cuda"""
    name: str
    total: int
    others: int
    """What neighbours hold."""
    context: int
    """What the driver takes for the process itself; outside the engine's budget."""

    @property
    def free(self) -> int:
        return max(0, self.total - self.others - self.context)


class Forecast(Value, frozen=True, kw_only=True):
    """The answer: whether what was asked for fits, and what would."""

    fits: bool
    verdict: str
    machine: Machine
    plan: MemoryPlan | None
    """The nearest settings that fit; None where nothing does."""

    def rows(self) -> Iterator[tuple[str, int, str]]:
        """(what, bytes, remark) of each thing that memory goes to."""
        machine, plan = self.machine, self.plan
        if machine.others:
            yield "neighbours", machine.others, "given, or measured"
        if machine.context:
            yield "context", machine.context, "the driver's, of this process"
        if plan is None:
            return
        yield from plan.rows()
        yield "unused", max(0, machine.free - plan.taken), "left to the neighbours"

    @property
    def at_once(self) -> dict[str, float]:
        """Sequences whose keys and values fit at one time, by their length."""
        if self.plan is None:
            return {}
        full = self.plan.max_model_len
        lengths = sorted({full, min(TYPICAL, full)}, reverse=True)
        return {f"{length:,} tokens": round(self.plan.kv_tokens / length, 1) for length in lengths}


def forecast(options: Mapping[str, str | None]) -> Forecast:
    """`options`: those of `surefoot serve` that bear on memory, and `gpu` (a size), `neighbours` (a size), `card` (a
    number). Raises ConfigError, ModelNotFound or CheckpointError.
    """
    own = {"gpu", "neighbours", "card"}
    machine = _machine(options.get("gpu"), options.get("neighbours"), options.get("card"))
    given = {name: value for name, value in options.items() if name not in own}
    config = settings.engine_config({**given, "device": machine.device})
    spec = read_spec(checkpoint.find(config.model, weights=False), config.model_impl)
    try:
        plan = _plan(spec, config, machine)
        if plan.budget <= machine.free:
            fits, verdict = _judge(spec, config, plan)
            return Forecast(fits=fits, verdict=verdict, machine=machine, plan=plan)
        free, short = format_bytes(machine.free), format_bytes(plan.budget - machine.free)
        verdict = f"It does not fit: the budget of {format_bytes(plan.budget)} is {short} more than the {free} free."
        plan = _plan(spec, replace(config, memory=machine.free), machine)
    except DoesNotFit as error:
        return Forecast(fits=False, verdict=error.message, machine=machine, plan=None)
    _, nearest = _judge(spec, config, plan)
    return Forecast(
        fits=False, verdict=f"{verdict} With --memory {machine.free}: {nearest}", machine=machine, plan=plan
    )


def _plan(spec: ModelSpec, config: EngineConfig, machine: Machine) -> MemoryPlan:
    memory = MachineMemory(total=machine.total, free=machine.free, name=machine.name)
    return plan_memory(spec, config, memory, device=machine.device, dtype=_dtype(config, spec, machine))


def _judge(spec: ModelSpec, config: EngineConfig, plan: MemoryPlan) -> tuple[bool, str]:
    """Whether the settings are those asked for, and the verdict; what nobody asked for may be fitted."""
    broken = [note for note in plan.notes if getattr(config, note.split()[0]) is not None]
    if broken:
        return False, f"It does not fit as asked. Nearest that does: {'; '.join(broken)}."
    limit = "" if plan.max_model_len == spec.max_position else f"; the model's own limit is {spec.max_position:,}"
    return True, f"It fits, with sequences of up to {plan.max_model_len:,} tokens{limit}."


def _machine(gpu: str | None, neighbours: str | None, card: str | None) -> Machine:
    if gpu is not None and card is not None:
        raise ConfigError("gpu: give the size of a card or the number of one that is here (--device), not both.")
    others = 0 if neighbours is None else parse_bytes(neighbours, name="neighbours")
    if gpu is not None:
        total = parse_bytes(gpu, name="gpu")
        return Machine(device="cuda", name="a GPU", total=total, others=others, context=overheads("cuda", "").context)
    if card is not None:
        return _card(card, others)
    memory = psutil.virtual_memory()
    held = memory.total - memory.available if neighbours is None else others
    return Machine(device="cpu", name="this machine", total=memory.total, others=held, context=0)


def _card(number: str, others: int) -> Machine:
    """A card that is here; neighbours are what is used now, and `others` on top. Raises ConfigError."""
    import pynvml  # the driver's library is not on every machine

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(int(number))
        memory, name = pynvml.nvmlDeviceGetMemoryInfo(handle), str(pynvml.nvmlDeviceGetName(handle))
    except (pynvml.NVMLError, ValueError) as error:
        raise ConfigError(f"device: no GPU {number!r} is here ({error}); --gpu 80GiB plans without one.") from None
    context = overheads("cuda", name).context
    return Machine(device="cuda", name=name, total=memory.total, others=memory.used + others, context=context)


def _dtype(config: EngineConfig, spec: ModelSpec, machine: Machine) -> str:
    """What `--dtype auto` will choose there; a CPU is taken to be one without bfloat16."""
    if config.dtype != "auto":
        return config.dtype
    if machine.device == "cpu":
        return "float32"
    return "float16" if spec.dtype == "float16" else "bfloat16"


def as_json(found: Forecast) -> str:
    """For programs: every row in bytes."""
    plan = found.plan
    names = ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "block_size", "num_blocks")
    answer = {
        "fits": found.fits,
        "verdict": found.verdict,
        "device": found.machine.name,
        "total": found.machine.total,
        "free": found.machine.free,
        "rows": {name: size for name, size, _ in found.rows()},
        "budget": None if plan is None else plan.budget,
        "settings": None if plan is None else {name: getattr(plan, name) for name in names},
        "sequences_at_once": found.at_once,
    }
    return msgspec.json.format(msgspec.json.encode(answer)).decode()


def show(found: Forecast, console: Console) -> None:
    """For people: the table, how many sequences, the verdict."""
    machine = found.machine
    heading = f"{machine.name}, {format_bytes(machine.total)}"
    table = Table(title=heading, title_justify="left", box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    for name, size, remark in found.rows():
        if size:
            table.add_row(title(name), format_bytes(size), remark)
    console.print(table)
    for length, count in found.at_once.items():
        console.print(f"{math.floor(count):,} sequences of {length} at once")
    console.print(found.verdict, style="green" if found.fits else "red", highlight=False)
