"""`/memory`: what a running server's memory goes to, and a new limit for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psutil

from surefoot.api.engine import Engine
from surefoot.config import format_bytes, parse_bytes
from surefoot.errors import ConfigError, InvalidRequest, Overloaded
from surefoot.plan import MIN_CONTEXT, MemoryPlan


def report(engine: Engine) -> dict[str, Any]:
    """Bytes of each row of the plan, of the KV cache as it is now, and what the system measures."""
    plan, snapshot = _plan(engine), engine.snapshot
    held = (snapshot.blocks_total + 1) * plan.block_bytes
    return {
        "limit": plan.fixed + held,
        "planned": plan.budget,
        "rows": {name: size for name, size, _ in plan.rows()} | {"kv_cache": held},
        "kv": {
            "block_bytes": plan.block_bytes,
            "block_size": plan.block_size,
            "blocks": snapshot.blocks_total,
            "blocks_planned": plan.num_blocks,
            "blocks_used": snapshot.blocks_used,
            "blocks_cached": snapshot.blocks_cached,
            "tokens": snapshot.blocks_total * plan.block_size,
        },
        "measured": _measured(engine.worker_pid),
        "failures": {"steps_oom": snapshot.steps_oom, "requests_failed": snapshot.requests_failed},
    }


async def limit(engine: Engine, body: Mapping[str, Any]) -> dict[str, Any]:
    """Hold a running server to `{"limit": "24GiB"}`, or to bytes; blocks beyond are taken from whoever has them, and
    computed again. Returns the report afterwards. Raises InvalidRequest for a limit that cannot be, Overloaded where
    there is not that much memory.
    """
    if set(body) != {"limit"}:
        raise InvalidRequest('The body must be {"limit": SIZE}, such as {"limit": "24GiB"}.', param="limit")
    blocks = _blocks(_plan(engine), body["limit"])
    answer = await engine.resize(blocks)
    if answer.refusal is not None:
        raise Overloaded(f"The cache stays at {answer.blocks} blocks: {answer.refusal}")
    return report(engine)


def _blocks(plan: MemoryPlan, asked: object) -> int:
    """KV blocks under a limit; at most those planned at start."""
    if isinstance(asked, bool) or not isinstance(asked, int | str):
        raise InvalidRequest("limit must be a size: bytes, or a text such as 24GiB.", param="limit")
    try:
        size = asked if isinstance(asked, int) else parse_bytes(asked, name="limit")
    except ConfigError as error:
        raise InvalidRequest(error.message, param="limit") from None
    floor = -(-min(MIN_CONTEXT, plan.max_model_len) // plan.block_size)
    blocks = (size - plan.fixed) // plan.block_bytes - 1
    if blocks < floor:
        least = plan.fixed + (floor + 1) * plan.block_bytes
        raise InvalidRequest(
            f"limit: weights, one step and a sequence of {floor * plan.block_size} tokens need {format_bytes(least)}, "
            f"and {format_bytes(size)} were given.",
            param="limit",
        )
    return min(blocks, plan.num_blocks)


def _plan(engine: Engine) -> MemoryPlan:
    plan = engine.info.plan
    if plan is None:
        raise Overloaded("The engine has told no plan of its memory.")
    return plan


def _measured(pid: int | None) -> dict[str, Any]:
    """What the system says of the worker, the machine, and the card that the worker is on, if it is on one."""
    found: dict[str, Any] = {"machine_available": psutil.virtual_memory().available}
    if pid is not None:
        try:
            found["worker_rss"] = psutil.Process(pid).memory_info().rss
        except psutil.NoSuchProcess:
            return found
        found |= _card(pid)
    return found


def _card(pid: int) -> dict[str, Any]:
    """The card that process `pid` computes on: what is free of it, and what each process holds."""
    import pynvml

    try:
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            processes = {each.pid: each.usedGpuMemory for each in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
            if pid in processes:
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
                others = {str(other): size for other, size in processes.items() if other != pid}
                return {
                    "card_total": memory.total,
                    "card_free": memory.free,
                    "card_ours": processes[pid],
                    "card_neighbours": others,
                }
    except pynvml.NVMLError:
        pass  # no driver, or one that does not tell
    return {}
