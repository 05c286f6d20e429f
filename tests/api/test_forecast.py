"""`surefoot plan`: arithmetic on a config.json, through the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from surefoot.cli import app
from surefoot.config import GIB, MIB
from surefoot.errors import ConfigError

GLM4_9B = {
    "architectures": ["GlmForCausalLM"], "model_type": "glm", "hidden_size": 4096, "intermediate_size": 13696,
    "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
    "attention_bias": True, "hidden_act": "silu", "rms_norm_eps": 1.5625e-07, "max_position_embeddings": 131072,
    "vocab_size": 151552, "partial_rotary_factor": 0.5, "rope_theta": 5000000.0, "tie_word_embeddings": False,
    "eos_token_id": [151329, 151336, 151338], "pad_token_id": 151329, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def glm(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(GLM4_9B))
    return str(tmp_path)


def plan(*arguments: str) -> tuple[int, dict[str, Any]]:
    """(exit status, what --json prints)."""
    result = CliRunner().invoke(app, ["plan", *arguments, "--json"], catch_exceptions=False)
    return result.exit_code, json.loads(result.stdout)


def test_the_shared_card(glm: str) -> None:
    """GLM-4-9B on a card of 80 GiB of which neighbours hold 38: it fits at 128k, and the rows add up to the card."""
    status, found = plan(glm, "--gpu", "80GiB", "--neighbours", "38GiB", "--max-model-len", "128k")
    rows = found["rows"]
    assert (status, found["fits"]) == (0, True)
    assert isinstance(rows, dict)
    assert rows["weights"] == pytest.approx(17.57 * GIB, rel=0.01)
    assert abs(sum(rows.values()) - 80 * GIB) < 64 * MIB
    assert found["settings"]["max_model_len"] == 131_072
    assert found["settings"]["num_blocks"] * 128 > 4 * 131_072


def test_what_was_asked_for_and_does_not_fit(glm: str) -> None:
    """A context that the card cannot hold: status 1, and the nearest that it can."""
    status, found = plan(glm, "--gpu", "24GiB", "--max-model-len", "128k")
    assert (status, found["fits"]) == (1, False)
    assert "max_model_len is" in str(found["verdict"])
    nearest = found["settings"]["max_model_len"]
    assert plan(glm, "--gpu", "24GiB", "--max-model-len", str(nearest))[0] == 0


def test_what_nobody_asked_for_is_fitted(glm: str) -> None:
    """Without --max-model-len the context is what fits, and that is a fit."""
    status, found = plan(glm, "--gpu", "24GiB")
    assert status == 0
    assert "the model's own limit is 131,072" in str(found["verdict"])


def test_weights_that_do_not_fit(glm: str) -> None:
    """A card too small for the weights: status 1, no settings, and the numbers."""
    status, found = plan(glm, "--gpu", "16GiB")
    assert (status, found["settings"]) == (1, None)
    assert "weights 17.5" in str(found["verdict"])


def test_a_budget_beyond_what_is_free(glm: str) -> None:
    """--memory over what neighbours leave does not fit, and says by how much."""
    status, found = plan(glm, "--gpu", "80GiB", "--neighbours", "60GiB", "--memory", "30GiB")
    assert status == 1
    assert "more than the" in found["verdict"]
    nearest = found["verdict"].split("--memory ")[1].split(":")[0]
    assert plan(glm, "--gpu", "80GiB", "--neighbours", "60GiB", "--memory", nearest)[0] == 0


def test_the_embedded_model_for_people() -> None:
    """Without a GPU the plan is this machine's; the table names every row and ends in the verdict."""
    result = CliRunner().invoke(app, ["plan", "--memory", "2GiB"], catch_exceptions=False)
    assert result.exit_code == 0
    for row in ("weights", "activations", "logits", "reserve", "KV cache", "It fits"):
        assert row in result.stdout


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("--gpu", "big"), "gpu"),
        (("--gpu", "80GiB", "--device", "0"), "gpu"),
        (("--gpu", "80GiB", "--neighbours", "-1"), "neighbours"),
        (("--device", "seven"), "device"),
        (("--max-model-len", "0"), "max_model_len"),
    ],
)
def test_bad_settings_are_named(arguments: tuple[str, ...], name: str) -> None:
    """A setting that cannot be read is an error that begins with its name."""
    with pytest.raises(ConfigError, match=f"^{name}"):
        CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)
