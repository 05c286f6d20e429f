"""What the documents say against what the code does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import surefoot
from scripts import settings_page, vllm_page
from surefoot import cli, errors, families, gguf, gguf_spec
from surefoot.api.openai import ChatRequest, CompletionRequest, Schema
from surefoot.faults import ACTIONS, Faults

ROOT = Path(surefoot.__file__).parent.parent
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_settings_are_those_of_the_command_line() -> None:
    """docs/settings.md is what the script writes: each flag, variable, key, default and help text of the code."""
    assert text("docs/settings.md") == settings_page.page(), "run python -m scripts.settings_page"


@pytest.mark.parametrize(
    "kind",
    [*errors.RequestError.__subclasses__(), *errors.StartupError.__subclasses__()],
    ids=lambda kind: kind.__name__,
)
def test_every_error_has_a_line(kind: type[errors.SurefootError]) -> None:
    """docs/errors.md has each class with its status and type, or its exit status."""
    start = f"| `{kind.__name__}` | "
    start += f"{kind.status} | `{kind.type}` |" if issubclass(kind, errors.RequestError) else f"{kind.exit_code} |"  # type: ignore[attr-defined]
    assert [line for line in text("docs/errors.md").splitlines() if line.startswith(start)]


def test_flags_of_vllm_are_those_that_are_taken() -> None:
    """docs/vllm.md has what becomes of each flag, as the code does it."""
    assert text("docs/vllm.md") == vllm_page.page(), "run python -m scripts.vllm_page"


def test_examples_of_faults_are_rules() -> None:
    """Every rule that docs/faults.md shows can be read, and every action is shown."""
    page = text("docs/faults.md")
    shown = re.findall(r"SUREFOOT_FAULTS='([^']+)'", page) + re.findall(r"\| `(\w+:\w+:[^`]+)` \|", page)
    assert len(shown) > 8
    rules = [rule for example in shown for rule in Faults.parse(example).rules]
    assert {rule.action for rule in rules} == set(ACTIONS)
    assert {rule.kind for rule in rules} == {"step", "p", "tokens"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    """A relative link names a file or folder that is there."""
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_commands_of_the_documents_exist() -> None:
    """Every `surefoot …` command that a page shows is one, with flags that it has."""
    known = {"serve", "chat", "generate", "bench", "plan", "memory", "version"}
    for page in PAGES:
        for command, rest in re.findall(
            r"(?:^|[`'] ?)surefoot ([a-z]+)((?: [^`\n#]*)?)", page.read_text(), re.MULTILINE
        ):
            assert command in known, f"{page.name}: surefoot {command}"
            flags = re.findall(r"--[a-z-]+", rest)
            shown = _help(*(["bench", "serve"] if command == "bench" else [command]))
            assert not [flag for flag in flags if flag not in shown], f"{page.name}: {command} {flags}"


def _help(*command: str) -> set[str]:
    found = typer.main.get_command(cli.app)
    for name in command:
        found = found.commands[name]  # type: ignore[attr-defined]
    return {option for parameter in found.params for option in parameter.opts}


@pytest.mark.slow
def test_the_offline_example_runs() -> None:
    """examples/offline.py answers its prompts as the README would have it."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "offline.py")],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "'The capital of France is' → ' Paris" in done.stdout


@pytest.mark.parametrize("schema", [ChatRequest, CompletionRequest])
def test_every_field_of_a_request_has_its_row(schema: type[Schema]) -> None:
    """docs/api.md names each field of the generating endpoints."""
    page = text("docs/api.md")
    assert [name for name in schema.model_fields if f"`{name}`" not in page] == []


def test_models_are_all_listed() -> None:
    """docs/models.md names each architecture of directories and of GGUF files, and each type of GGUF tensors."""
    page = text("docs/models.md")
    for name in (*families.FAMILIES, *gguf_spec.FAMILIES):
        assert f"`{name}`" in page, name
    for kind in gguf.BLOCKS:
        assert kind in page, kind
