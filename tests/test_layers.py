"""The listing is the path: imports only go down a request's way, and running out of memory has one home."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import surefoot

ROOT = Path(surefoot.__file__).parent
ROOT_MODULES = {
    "types",
    "errors",
    "config",
    "grammar",
    "spec",
    "plan",
    "testing",
    "gguf",
    "checkpoint",
    "sampling",
    "faults",
} | {
    "architecture",  # ModelSpec and its tensors; read by
    "families",  # config.json of each family, through
    "gguf_spec",  # a GGUF file's metadata, through
    "generic",  # config.json of what transformers computes, through
    "quantized",  # how it packs weights, through
    "reading",  # strict reads
}
FOLDERS = {
    "api": {"api", "bridge"},
    "bridge": {"bridge"},
    "core": {"core"},
    "device": {"device", "model", "ops"},
    "model": {"model", "ops"},
    "ops": {"ops"},
}
ONLY_WORKER = {"core", "device"}
TORCH_FREE = ("api", "core", "bridge")


MODULES = [
    (path.relative_to(ROOT).with_suffix("").as_posix(), ast.parse(path.read_text()))
    for path in sorted(ROOT.rglob("*.py"))
]
each_module = pytest.mark.parametrize(("module", "tree"), MODULES, ids=[module for module, _ in MODULES])


def imports(tree: ast.AST) -> Iterator[str]:
    """Every imported module by its full name, wherever the import stands: in functions and under TYPE_CHECKING too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def allowed(module: str, part: str) -> bool:
    """Whether `module` (such as "core/blocks") may import from `surefoot.<part>`."""
    folder = module.split("/")[0]
    if module in ("cli", "vllm", "__init__", "__main__"):
        return True
    if part in ROOT_MODULES or part == "__version__":
        return True
    if folder not in FOLDERS:
        return False
    return part in FOLDERS[folder] or (module == "bridge/worker" and part in ONLY_WORKER)


@each_module
def test_imports_go_down_only(module: str, tree: ast.Module) -> None:
    """A module imports its own folder, what lies below it on the path, and the root vocabulary; nothing else."""
    for name in imports(tree):
        head, *rest = name.split(".")
        if head == "surefoot" and rest:
            assert allowed(module, rest[0]), f"{module} imports {name}"


@each_module
def test_text_and_decisions_are_torch_free(module: str, tree: ast.Module) -> None:
    """Only device, model, ops and bridge/worker name torch."""
    folder = module.split("/")[0]
    if (folder in TORCH_FREE and module != "bridge/worker") or "/" not in module:
        assert not [name for name in imports(tree) if name.split(".")[0] == "torch"], module


@pytest.mark.parametrize(
    "module", ["surefoot.api.app", "surefoot.bridge.client", "surefoot.core.engine", "surefoot.cli"]
)
def test_loads_without_torch(module: str) -> None:
    """Importing the server, the client and the engine pulls in neither torch nor transformers."""
    code = f"import sys, {module}; assert not {{'torch', 'transformers'}} & set(sys.modules), 'torch came along'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def catches_memory(handler: ast.ExceptHandler) -> bool:
    """True for a handler that could swallow running out of memory: by name, as RuntimeError, or bare."""
    if handler.type is None:
        return True
    names = {
        node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "") for node in ast.walk(handler.type)
    }
    return bool(names & {"MemoryError", "OutOfMemoryError", "RuntimeError", "Exception", "BaseException"})


def test_running_out_of_memory_is_caught_in_one_function() -> None:
    """In device, model, ops and core one function catches failures of the device: the guard."""
    found = set()
    for module, tree in MODULES:
        if module.split("/")[0] not in ("device", "model", "ops", "core"):
            continue
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                for node in ast.walk(function):
                    if isinstance(node, ast.ExceptHandler) and catches_memory(node):
                        found.add(f"{module}:{function.name}")
    assert found == {"device/memory:guard"}
