"""Writes the table of docs/vllm.md out of `surefoot.api.vllm_flags`; tests/test_docs.py holds the page to it.

python -m scripts.vllm_page
"""

from __future__ import annotations

import json
from pathlib import Path

from surefoot.api import settings, vllm_flags

PAGE = Path(__file__).parent.parent / "docs" / "vllm.md"
MARK = "<!-- The rest is written by `python -m scripts.vllm_page`. -->\n"


def table() -> str:
    """A row for each setting of vLLM's that is none of ours, and for each that has another name here."""
    rows = [f"| `--{_dashed(old)}` | is `--{_dashed(new)}` |" for old, new in vllm_flags.RENAMED.items()]
    for name, entry in vllm_flags.TABLE.items():
        if name not in settings.SETTINGS:
            rows.append(f"| `--{_dashed(name)}` | {_fate(entry)}: {entry.why} |")
    return "| flag | here |\n|---|---|\n" + "\n".join(sorted(rows)) + "\n"


def page() -> str:
    """The page as it should be."""
    return PAGE.read_text(encoding="utf-8").split(MARK)[0] + MARK + "\n" + table()


def _fate(entry: vllm_flags.Moot | vllm_flags.Only) -> str:
    if isinstance(entry, vllm_flags.Moot):
        return "changes nothing"
    taken = [value for value in (entry.default, *entry.fine) if value is not None]
    return "refused" + (f", but for {' and '.join(map(_shown, taken))}" if taken else "")


def _shown(value: object) -> str:
    return f"`{value if isinstance(value, str) and value else json.dumps(value)}`"


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
