"""Every kernel on the card against float64, in bfloat16."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench" / "kernels.py"


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.timeout(400)
def test_every_kernel_is_right_on_the_card(tmp_path: Path) -> None:
    """The benchmark's own checks all pass, and each names an error within its limit."""
    numbers = tmp_path / "kernels.json"
    done = subprocess.run(
        [sys.executable, str(BENCH), "--json", str(numbers)], capture_output=True, text=True, timeout=380, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    errors = [row["error"] for row in json.loads(numbers.read_text())["rows"] if "error" in row]
    assert len(errors) > 30
    assert max(errors) <= 1e-2
