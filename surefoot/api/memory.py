"""What a running server's memory goes to, what of it is left, and a new limit for it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, Final

import psutil

from surefoot.api.engine import Engine
from surefoot.config import format_bytes, parse_bytes
from surefoot.errors import ConfigError, InvalidRequest, Overloaded
from surefoot.plan import MIN_CONTEXT, MemoryPlan

FRESH: Final = 0.5
"""Seconds for which a measurement is good: whoever is refused reads one, and they may be many."""
RETRY_AFTER: Final = 5
"""Seconds after which a prompt that had no room may come again."""


class Memory:
    """Reads the plan, the engine's counts and the system; changes nothing but by `limit`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._measured: dict[str, Any] = {}
        self._measured_at = -math.inf

    # ---- shown ------------------------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """Bytes of each row of the plan, of the KV cache as it is now, and what the system measures."""
        plan, snapshot = self._plan(), self._engine.snapshot
        return {
            "limit": plan.fixed + self._kv(plan) + snapshot.blocks_idle * plan.block_bytes,
            "planned": plan.budget,
            "rows": self.rows(),
            "kv": {
                "block_bytes": plan.block_bytes,
                "block_size": plan.block_size,
                "blocks": snapshot.blocks_total,
                "blocks_planned": plan.num_blocks,
                "blocks_idle": snapshot.blocks_idle,
                "blocks_used": snapshot.blocks_used,
                "blocks_cached": snapshot.blocks_cached,
                "tokens": snapshot.blocks_total * plan.block_size,
            },
            "measured": self.measured(),
            "failures": {
                "steps_oom": snapshot.steps_oom,
                "requests_failed": snapshot.requests_failed,
                "retries": snapshot.retries,
                "shrinks": snapshot.shrinks,
            },
        }

    def rows(self) -> dict[str, int]:
        """Bytes of each row of the plan, with the KV cache as it is now; none where no plan is known."""
        plan = self._engine.info.plan
        if plan is None:
            return {}
        return {name: size for name, size, _ in plan.rows()} | {"kv_cache": self._kv(plan)}

    def measured(self) -> dict[str, Any]:
        """What the system says of the device that the worker is on, in bytes: all of it, what is free, what the worker
        holds (`ours`) and what others do (`neighbours`, on a GPU by process too); read anew after half a second.
        """
        now = time.monotonic()
        if now - self._measured_at >= FRESH:
            self._measured, self._measured_at = _measure(self._engine.worker_pid), now
        return self._measured

    # ---- room for a prompt ------------------------------------------------------------------------------------------

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that the cache, as large as it is now, can hold with one token more."""
        snapshot, limits = self._engine.snapshot, self._engine.info.limits
        return min(limits.max_model_len, (snapshot.blocks_total + snapshot.blocks_idle) * limits.block_size) - 1

    def check_room(self, tokens: int) -> None:
        """Raises Overloaded, with the numbers, for a prompt that needs more than the cache has now."""
        if tokens <= self.longest_prompt:
            return
        numbers = self.numbers(tokens)
        raise Overloaded(
            f"This prompt has {tokens} tokens, and the longest that fits now has {max(0, self.longest_prompt)}: the "
            f"server's memory was limited since it started. {_told(numbers)} Try again later, or send a shorter one.",
            retry_after=RETRY_AFTER,
            details={"memory": numbers},
        )

    def numbers(self, tokens: int) -> dict[str, int]:
        """What an error about memory tells, in bytes and tokens: what a prompt of `tokens` needs and what there is."""
        snapshot, limits, plan = self._engine.snapshot, self._engine.info.limits, self._engine.info.plan
        unheld = snapshot.blocks_total + snapshot.blocks_idle - snapshot.blocks_used
        measured = self.measured()
        found: dict[str, int] = {name: measured[name] for name in ("free", "ours", "neighbours")}
        if plan is not None:
            found["needed"] = -(-(tokens + 1) // limits.block_size) * plan.block_bytes
            found["kv_free"] = unheld * plan.block_bytes
        found["longest_prompt"] = max(0, self.longest_prompt)
        found["longest_prompt_now"] = max(0, min(self.longest_prompt, unheld * limits.block_size - 1))
        return found

    # ---- limited ----------------------------------------------------------------------------------------------------

    async def limit(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Hold a running server to `{"limit": "24GiB"}`, or to bytes; blocks beyond are moved, or taken from whoever
        has them and computed again. Returns the report afterwards. Raises InvalidRequest for a limit that cannot be,
        Overloaded where there is not that much memory.
        """
        if set(body) != {"limit"}:
            raise InvalidRequest('The body must be {"limit": SIZE}, such as {"limit": "24GiB"}.', param="limit")
        plan = self._plan()
        asked = _blocks(plan, body["limit"])
        answer = await self._engine.resize(asked)
        if answer.refusal is not None:
            least = plan.fixed + (answer.least + 1) * plan.block_bytes
            now = f"; the smallest limit now is {format_bytes(least)}" if asked < answer.least else ""
            raise Overloaded(
                f"The cache stays at {answer.blocks} blocks of {plan.block_size} tokens: {answer.refusal}{now}.",
                retry_after=RETRY_AFTER,
            )
        self._measured_at = -math.inf
        return self.report()

    def _plan(self) -> MemoryPlan:
        plan = self._engine.info.plan
        if plan is None:
            raise Overloaded("The engine has told no plan of its memory.")
        return plan

    def _kv(self, plan: MemoryPlan) -> int:
        return (self._engine.snapshot.blocks_total + 1) * plan.block_bytes


def _told(numbers: Mapping[str, int]) -> str:
    """The bytes among `numbers` in a sentence."""
    names = {"needed": "needed", "kv_free": "free in the cache", "free": "free on the device", "ours": "ours",
             "neighbours": "the neighbours'"}  # fmt: skip
    parts = [f"{format_bytes(numbers[name])} {text}" for name, text in names.items() if name in numbers]
    return f"Memory: {', '.join(parts)}." if parts else ""


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


def _measure(pid: int | None) -> dict[str, Any]:
    """Of the card that process `pid` computes on; of this machine where it is on none."""
    card = None if pid is None else _card(pid)
    if card is not None:
        return card
    machine = psutil.virtual_memory()
    found: dict[str, Any] = {"device": "cpu", "total": machine.total, "free": machine.available}
    try:
        found["ours"] = 0 if pid is None else psutil.Process(pid).memory_info().rss
    except psutil.NoSuchProcess:  # it died, and another takes its place
        found["ours"] = 0
    return found | {"neighbours": max(0, machine.total - machine.available - found["ours"])}


def _card(pid: int) -> dict[str, Any] | None:
    """The card that process `pid` computes on; None without one."""
    import pynvml

    try:
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            held = {each.pid: each.usedGpuMemory for each in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
            if pid in held:
                memory, ours = pynvml.nvmlDeviceGetMemoryInfo(handle), held.pop(pid) or 0
                return {
                    "device": str(pynvml.nvmlDeviceGetName(handle)),
                    "total": memory.total,
                    "free": memory.free,
                    "ours": ours,
                    "neighbours": max(0, memory.total - memory.free - ours),
                    "processes": {str(other): size for other, size in held.items()},
                }
    except pynvml.NVMLError:
        pass  # no driver, or one that does not tell
    return None
