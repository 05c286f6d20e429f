"""Grammars on a GPU, with two steps in flight: the mask of a step waits for the token of the one before."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from surefoot.config import EngineConfig
from surefoot.device.start import open_device
from tests.device.conftest import TINY
from tests.device.driver import Driver
from tests.device.test_grammar import written

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Driver]:
    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(TINY | shape))

    def open_it(**settings: object) -> Driver:
        config = {"model": str(tmp_path), "load_format": "dummy", "device": "cuda", "memory": 2 << 30} | settings
        return Driver(open_device(EngineConfig(**config), progress=lambda what, part: None))  # type: ignore[arg-type]

    return open_it


def test_every_text_keeps_to_its_grammar(opened: Callable[..., Driver]) -> None:
    """Children, rows beside plain ones, and steps in flight that fail: each text is what its grammar allows."""
    faults = {"faults": "execute:oom:p=0.1", "allow_fault_injection": True}
    for settings in ({}, faults):
        said = written(opened(**settings))
        assert len(said) == 6
        assert all(set(json.loads(each)) == {"a", "b"} for each in said.values())
