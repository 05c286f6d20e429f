"""How a client deals with requests and workers, as the settings of a server have it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What the client admits, and how often it starts a worker anew."""

    max_queued_requests: int = 1024
    max_queued_tokens: int = 1 << 20
    max_restarts: int = 0
    """Workers that are replaced within `restart_window` seconds before the server gives up."""
    restart_window: float = 300.0
    startup_timeout: float = 600.0
    incident_dir: str | None = None
    """Folder for a record of each death (`bridge.incident`)."""
    sleep_after: float | None = None
    """Seconds without requests after which the worker is ended until there is one; None: never."""
