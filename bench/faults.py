"""What clients see while a running server is hurt: its worker killed or stopped, its memory limited, its card taken.

    surefoot serve FOLDER --load-format dummy --memory 40GiB --admin-api-key secret --served-model-name glm
    python bench/faults.py [kill] [stop] [limit] [hog]        (all of them by default; under three minutes on a GPU)

Each part runs streams of random token ids against http://127.0.0.1:8000 and prints how many ended whole, and the
longest pause that one of them saw. `hog` needs a GPU: another process takes all of it but 40 MiB for 25 s.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

URL = "http://127.0.0.1:8000"
ADMIN = {"authorization": f"Bearer {os.environ.get('SUREFOOT_ADMIN_API_KEY', 'secret')}"}
HOG = """
import time, torch
held = [torch.zeros(1, device='cuda')]
while (left := torch.cuda.mem_get_info()[0] - (40 << 20)) > 64 << 20:
    held.append(torch.empty(left, dtype=torch.uint8, device='cuda'))
time.sleep(25)
"""


@dataclass
class Seen:
    """One stream: whether it ended whole, and its longest pause in seconds."""

    whole: bool
    pause: float
    error: str = ""


async def stream(client: httpx.AsyncClient, tokens: int, output: int, seed: int) -> Seen:
    draw = random.Random(seed)
    body = {
        "prompt": [draw.randrange(1000, 20_000) for _ in range(tokens)], "max_tokens": output, "temperature": 0,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    latest, pause, emitted = time.perf_counter(), 0.0, 0
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        if not reply.is_success:
            return Seen(False, 0.0, (await reply.aread()).decode()[:300])
        async for line in reply.aiter_lines():
            now = time.perf_counter()
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                return Seen(emitted == output, pause)
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                return Seen(False, pause, str(event["error"]))
            if event.get("usage"):
                emitted = event["usage"]["completion_tokens"]
            pause, latest = max(pause, now - latest), now
    return Seen(False, pause, "it ended in silence")


def told(name: str, seen: list[Seen]) -> None:
    """One line: how many were whole, the longest pause, the first error."""
    errors = [each.error for each in seen if each.error]
    whole = sum(each.whole for each in seen)
    longest = max(each.pause for each in seen)
    print(f"{name}: {whole} of {len(seen)} whole, longest pause {longest:.2f} s {errors[:1] or ''}", flush=True)


def worker() -> psutil.Process:
    for process in psutil.process_iter(["cmdline"]):
        if "surefoot.bridge.worker" in (process.info["cmdline"] or ()):
            return process
    sys.exit("bench/faults.py: no worker of Surefoot runs here.")


def worker_restarts(reply: httpx.Response) -> float:
    lines = (line for line in reply.text.splitlines() if line.startswith("surefoot:worker_restarts_total"))
    return sum(float(line.split()[-1]) for line in lines)


async def signalled(client: httpx.AsyncClient, name: str, number: int) -> None:
    """32 streams, and a signal to the worker three seconds later."""
    before = worker_restarts(await client.get("/metrics"))
    streams = asyncio.gather(*(stream(client, 512, 600, seed) for seed in range(32)))
    await asyncio.sleep(3)
    worker().send_signal(number)
    began = time.perf_counter()
    healthy = False
    while not healthy:
        await asyncio.sleep(0.05)
        replaced = worker_restarts(await client.get("/metrics")) > before
        healthy = replaced and (await client.get("/health")).is_success
    print(f"{name}: healthy {time.perf_counter() - began:.2f} s after the signal")
    told(name, await streams)


async def memory(client: httpx.AsyncClient, limit: int | str | None = None) -> dict[str, Any]:
    if limit is None:
        return (await client.get("/memory", headers=ADMIN)).json()
    return (await client.post("/memory", headers=ADMIN, json={"limit": limit})).json()


async def limited(client: httpx.AsyncClient) -> None:
    """64 streams; nine tenths of the cache are given back while they run, and taken again."""
    before = await memory(client)
    streams = asyncio.gather(*(stream(client, 2048, 400, seed) for seed in range(64)))
    await asyncio.sleep(2)
    for name, limit in (("down", before["limit"] - before["rows"]["kv_cache"] * 9 // 10), ("up", before["limit"])):
        began = time.perf_counter()
        found = await memory(client, limit)
        took = time.perf_counter() - began
        free = found["measured"]["free"]
        print(f"limit {name}: {found['kv']['blocks']} blocks after {took:.3f} s, {free >> 20:,} MiB free")
        await asyncio.sleep(1)
    told("limit", await streams)


async def hogged(client: httpx.AsyncClient) -> None:
    """A neighbour takes the card; 31 streams and a prompt of 60,000 tokens."""
    hog = subprocess.Popen([sys.executable, "-c", HOG])  # noqa: ASYNC220 - takes no time
    await asyncio.sleep(6)
    short = [stream(client, 512, 200, seed) for seed in range(31)]
    told("hog", await asyncio.gather(*short, stream(client, 60_000, 16, 99)))
    hog.wait()


async def main(parts: list[str]) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=URL, timeout=300.0, limits=limits) as client:
        if "kill" in parts:
            await signalled(client, "kill", signal.SIGKILL)
        if "stop" in parts:
            await signalled(client, "stop", signal.SIGSTOP)
        if "limit" in parts:
            await limited(client)
        if "hog" in parts:
            await hogged(client)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:] or ["kill", "stop", "limit", "hog"]))
