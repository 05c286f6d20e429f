"""Logging of both processes: one line per event, on stderr."""

from __future__ import annotations

import logging
import sys

import structlog

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}


def configure(level: str, process: str) -> None:
    """Send structlog and the standard library's logging to stderr from `level` on, each line naming the process."""
    number = LEVELS[level]
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%Y-%m-%d %H:%M:%S"),
            structlog.processors.format_exc_info,
            _name(process),
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    logging.basicConfig(
        level=max(number, logging.INFO if level != "debug" else logging.DEBUG),
        stream=sys.stderr,
        format=f"%(asctime)s [%(levelname)s] %(name)s: %(message)s process={process}",
        datefmt="%Y-%m-%d %H:%M:%S",
    )


def _name(process: str) -> structlog.types.Processor:
    def add(_logger: object, _method: str, event: structlog.types.EventDict) -> structlog.types.EventDict:
        return {**event, "process": process}

    return add
