"""The network, its weights and where they come from; and the embedded model against the reference implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from surefoot import checkpoint as checkpoints
from surefoot.api.tokenizer import load_tokenizer
from surefoot.config import EngineConfig
from surefoot.device.start import open_device
from surefoot.errors import CheckpointError
from surefoot.model import weights
from surefoot.model.decoder import Decoder
from surefoot.model.registry import network_class
from surefoot.spec import ModelSpec, read_spec
from tests.device.driver import Driver

TINY = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=100,
    token_count=100,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=64,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tie_word_embeddings=False,
    attention_bias=True,
    eos_token_ids=(2,),
    bos_token_id=1,
    dtype="float32",
)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "change"), [("lacks model.norm.weight", "drop"), ("does not have: model.extra", "add")]
)
def test_tensors_must_be_those_of_the_network(name: str, change: str) -> None:
    """A tensor that is missing, or that nobody takes, is an error that names it."""
    tensors = dict(weights.dummy(TINY, dtype=torch.float32))
    if change == "drop":
        del tensors["model.norm.weight"]
    else:
        tensors["model.extra"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match=name):
        Decoder.load(TINY, iter(tensors.items()), device=CPU, dtype=torch.float32)


def test_an_unknown_architecture_is_refused_with_those_supported() -> None:
    """The registry names what it knows."""
    assert network_class("LlamaForCausalLM") is Decoder
    with pytest.raises(CheckpointError, match=r"'NopeForCausalLM'.*LlamaForCausalLM"):
        network_class("NopeForCausalLM")


@pytest.mark.parametrize(
    ("trait", "name"),
    [
        ({"sliding_window": 8, "window_layers": (1,)}, "sliding windows"),
        ({"attention_softcap": 50.0}, "capped attention scores"),
        ({"unrotated_layers": (0,)}, "layers that do not turn"),
    ],
)
def test_what_only_the_cpu_computes_is_refused_elsewhere(trait: dict[str, Any], name: str) -> None:
    """A trait without a kernel is an error that names it, before a weight is loaded."""
    spec = ModelSpec(**{field: getattr(TINY, field) for field in TINY.__struct_fields__} | trait)
    with pytest.raises(CheckpointError, match=name):
        Decoder.load(spec, iter(()), device=torch.device("meta"), dtype=torch.float32)


# ---- the embedded model ---------------------------------------------------------------------------------------------

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time there was a",
    "Water boils at a temperature of",
    "List three colours: red,",
    "2 + 2 =",
    "The quick brown fox jumps over",
    "In 1969, the first",
    "Dear Sir or Madam,",
    "The opposite of hot is",
    "import numpy as np\n",
    "To bake bread, you need flour,",
    "Shakespeare wrote",
    "The largest planet of the solar system is",
    "A haiku about autumn:\n",
    "The mitochondria is",
    "Question: How many legs has a spider?\nAnswer:",
    "<html>\n<head>",
    "Les enfants jouent dans",
    "SELECT name FROM users WHERE",
)
TOKENS = 8


@pytest.fixture(scope="module")
def embedded() -> Driver:
    config = EngineConfig(memory=2 << 30, max_num_seqs=len(PROMPTS))
    return Driver(open_device(config, progress=lambda what, part: None))


@pytest.fixture(scope="module")
def encoded() -> list[list[int]]:
    tokenizer = load_tokenizer(checkpoints.find("smollm2"))
    return [list(tokenizer.encode(text)) for text in PROMPTS]


@pytest.fixture(scope="module")
def transformers_model() -> Any:
    """transformers' network in float32, with the weights that we read from the GGUF."""
    transformers = pytest.importorskip("transformers")
    found = checkpoints.find("smollm2")
    spec = read_spec(found)
    config = transformers.LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        max_position_embeddings=spec.max_position,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        network = transformers.LlamaForCausalLM(config).eval()
    tensors = dict(weights.load(found, spec, dtype=torch.float32))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    network.load_state_dict(tensors, assign=True)
    network.model.rotary_emb = type(network.model.rotary_emb)(config)  # its frequencies are in no checkpoint
    return network


@pytest.mark.slow
def test_greedy_text_equals_transformers(embedded: Driver, encoded: list[list[int]], transformers_model: Any) -> None:
    """20 prompts go on with what transformers finds most likely after the same text; cut or alone, with the same."""
    drawn = embedded.generate([embedded.sequence(tokens) for tokens in encoded], TOKENS)
    texts = [tokens + [each.token for each in row] for tokens, row in zip(encoded, drawn, strict=True)]
    padded = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
    for row, tokens in enumerate(texts):
        padded[row, : len(tokens)] = torch.tensor(tokens)
    with torch.inference_mode():
        likely = transformers_model(padded, use_cache=False).logits.argmax(-1).tolist()
    for tokens, row in zip(texts, likely, strict=True):
        assert tokens[-TOKENS:] == row[len(tokens) - TOKENS - 1 : len(tokens) - 1]
    assert embedded.generate([embedded.sequence(tokens) for tokens in encoded], TOKENS, 5) == drawn
    assert embedded.generate([embedded.sequence(encoded[1])], TOKENS) == drawn[1:2]


@pytest.mark.slow
def test_logits_equal_transformers(embedded: Driver, encoded: list[list[int]], transformers_model: Any) -> None:
    """Logits are transformers' within 1e-4 of their scale, at every position of a long text."""
    tokens = [token for prompt in encoded for token in prompt]
    with torch.inference_mode():
        theirs = transformers_model(torch.tensor([tokens]), use_cache=False).logits[0]
    ours = embedded.logits(tokens, len(tokens))
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()
