"""Writes docs/settings.md out of the command line and the configuration; tests/test_docs.py holds it to them.

python scripts/settings_page.py
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer

from surefoot import cli
from surefoot.api import settings
from surefoot.config import EngineConfig, ServerConfig, format_bytes

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"
INTRODUCTION = """\
# Settings

Of `surefoot serve`. A flag beats a variable, which beats the YAML file of `--config` (or `SUREFOOT_CONFIG`), which
beats the default. `-` and `_` are the same in flags and YAML keys. An unknown name, or a value out of range, ends the
start with exit status 2 and the name of its source: a mistyped setting never becomes the default.

```yaml
# serve.yaml, for: surefoot serve --config serve.yaml
model: smollm2
port: 8000
memory: 2GiB
max_model_len: 4096
api_key: [first, second]
```

Sizes take `B`, `kB`, `MB`, `GB` and `KiB`, `MiB`, `GiB`; token counts take `k` (1,000) and `K` (1,024). A list is
several flags, a comma-separated variable, or a YAML list. `LLM(...)` takes the settings that are not the server's as
keywords.

<!-- The tables are written by `python -m scripts.settings_page`. -->
"""
_TOLD = re.compile(r" ?\(default:? ([^);]*)[^)]*\)")
FAULTS = "Failures on cue, obeyed only with --allow-fault-injection: see [faults](faults.md). Has no flag."
NAMES = {"served_model_name": "the model's own", "api_key": "none", "admin_api_key": "none", "faults": "none"}
"""What an empty default means."""


def page() -> str:
    """The whole page."""
    command = typer.main.get_command(cli.app).commands["serve"]  # type: ignore[attr-defined]
    given = {parameter.name: parameter for parameter in command.params}
    panels: dict[str, list[str]] = {}
    for name in settings.SETTINGS:
        panel = getattr(given.get(name), "rich_help_panel", None) or (cli.MODEL if name == "model" else cli.OTHER)
        panels.setdefault(panel, []).append(_row(name, given.get(name)))
    return INTRODUCTION + "".join(_table(panel, rows) for panel, rows in panels.items())


def _table(title: str, rows: list[str]) -> str:
    head = "| flag | variable | YAML key | default | what it is |\n|---|---|---|---|---|\n"
    return f"\n## {title}\n\n{head}" + "".join(rows)


def _row(name: str, parameter: Any) -> str:
    text = FAULTS if parameter is None else parameter.help
    told = _TOLD.search(text)
    default = _shown(name) or (told[1] if told else "none")
    flag = "" if parameter is None else "the argument" if name == "model" else f"`--{name.replace('_', '-')}`"
    text = _TOLD.sub("", text).replace("|", "\\|")
    return f"| {flag} | `{settings.PREFIX}{name.upper()}` | `{name}` | {default} | {text} |\n"


def _shown(name: str) -> str:
    """The default that the code has; empty where it is fitted to the device."""
    default = getattr(EngineConfig() if name in settings.ENGINE else ServerConfig(), name)
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, int | float):
        return format_bytes(default) if name.endswith("_bytes") else f"{default:g}" if default < 1e5 else f"{default:,}"
    return NAMES[name] if default in ((), "") else default or ""


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
