"""Networks that transformers computes over our cache, against transformers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from surefoot.config import EngineConfig
from surefoot.device.start import open_device
from surefoot.errors import CheckpointError
from tests.device.driver import Driver
from tests.model.test_exactness import reference, text
from tests.model.tiny import CASES, Case, write

pytestmark = pytest.mark.slow
CASES_OF_THEIRS = {
    "gpt-neox": Case("GPTNeoX", {"rotary_pct": 0.25, "num_key_value_heads": 4}),
    "olmo-2": Case("Olmo2", {}),
    "cohere": Case("Cohere", {"logit_scale": 0.25}),
    "granite": Case("Granite", {"logits_scaling": 2.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5}),
    "starcoder-2": Case("Starcoder2", {"sliding_window": 24}),
    "llama": CASES["llama-3"],
    "gemma-2": CASES["gemma-2"],
}


def opened(folder: Path, **more: Any) -> Driver:
    config = EngineConfig(model=str(folder), dtype="float32", memory=300 << 20, max_num_seqs=8, **more)
    return Driver(open_device(config, progress=lambda what, part: None))


@pytest.mark.parametrize("name", CASES_OF_THEIRS)
def test_logits_and_text_equal_transformers(tmp_path: Path, name: str) -> None:
    """Whole, cut and decoded within 1e-4 of their scale; greedy text in a batch of all lengths is the text alone."""
    theirs = write(tmp_path, CASES_OF_THEIRS[name], std=0.1)
    ours = opened(tmp_path, model_impl="transformers")
    assert ours.device.spec.implementation == "transformers"
    tokens = text()
    expected = reference(theirs, tokens)
    assert expected.std() > 0.1
    whole = ours.logits(tokens, len(tokens))
    assert (whole - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (ours.logits(tokens, 37, singles=20) - expected).abs().max() < 1e-4 * expected.abs().max()
    lengths = (1, 5, 90, 200)
    alone = [ours.generate([ours.sequence(text(length))], 6)[0] for length in lengths]
    together = ours.generate([ours.sequence(text(length)) for length in lengths], 6, 64)
    assert [[each.token for each in row] for row in together] == [[each.token for each in row] for row in alone]
    drawn = [each.token for each in alone[-1]]
    likely = reference(theirs, text(200) + drawn)[199:-1].argmax(-1)
    assert drawn == likely.tolist()


def test_auto_takes_transformers_for_what_is_not_built_here(tmp_path: Path) -> None:
    """Without being told, and with int8 weights, an architecture of transformers' is served."""
    theirs = write(tmp_path, CASES_OF_THEIRS["olmo-2"], std=0.1)
    ours = opened(tmp_path, quantization="int8")
    expected = reference(theirs, text())
    assert (ours.logits(text(), 100) - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize(
    ("family", "config", "said"),
    [
        ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64, "num_key_value_heads": 4}, "no attribute 'decoder'"),
        ("StableLm", {}, "does not let its attention be replaced"),
        ("Nope", {}, "does not know NopeForCausalLM"),
        ("GptOss", {"head_dim": 16, "num_local_experts": 4, "sliding_window": 24}, "attends with s_aux"),
    ],
)
def test_what_cannot_be_served_so_says_why(tmp_path: Path, family: str, config: dict[str, Any], said: str) -> None:
    """Another attention than ours, or an unknown class, is an error naming it before anything is served."""
    write(tmp_path, Case("Olmo2" if family == "Nope" else family, config))
    if family == "Nope":
        path = tmp_path / "config.json"
        path.write_text(path.read_text().replace("Olmo2ForCausalLM", "NopeForCausalLM"))
    with pytest.raises(CheckpointError, match=said):
        opened(tmp_path)
