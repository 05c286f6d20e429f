"""A record of a worker's death, for whoever looks into it later: what ran, how memory was. It holds no text and no ids
of tokens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil

from surefoot.bridge.handle import RequestHandle
from surefoot.types import Snapshot

KEPT = 100
"""Records in the folder; older ones go."""
log = logging.getLogger(__name__)


def record(
    folder: Path, *, reason: str, in_flight: Mapping[int, int], handles: Iterable[RequestHandle], snapshot: Snapshot
) -> None:
    """Write `incident-<time>.json`. A folder that cannot be written to is a line in the log, nothing more."""
    now = time.time()
    requests = [
        {
            "request": handle.id,
            "prompt_tokens": handle.prompt_tokens,
            "tokens": handle.tokens,
            "started": handle.started,
            "in_the_dying_step": handle.id in in_flight,
            "position": in_flight.get(handle.id),
        }
        for handle in handles
    ]
    memory = psutil.virtual_memory()
    content: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now)),
        "reason": reason,
        "requests": requests,
        "counts": snapshot,
        "memory": {"total": memory.total, "available": memory.available},
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"incident-{int(now * 1000)}.json"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
        for old in sorted(folder.glob("incident-*.json"))[:-KEPT]:
            old.unlink(missing_ok=True)
        log.warning("what was running is written down in %s", path)
    except OSError as error:
        log.warning("an incident could not be written to %s: %s", folder, error.strerror)
