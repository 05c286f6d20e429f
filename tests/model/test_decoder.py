"""The network equals the reference implementation, number for number."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from surefoot import checkpoint as checkpoints
from surefoot.config import EngineConfig
from surefoot.device.start import Device, open_device
from surefoot.errors import CheckpointError
from surefoot.model import weights
from surefoot.model.decoder import Decoder
from surefoot.model.registry import network_class
from surefoot.spec import ModelSpec, read_spec
from surefoot.types import Sample, Sampled, SamplingParams, StepDone, StepPlan, Work

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


def reference(spec: ModelSpec, tensors: dict[str, torch.Tensor]) -> Any:
    """transformers' network with these weights, in float32."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_position,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        tie_word_embeddings=spec.tie_word_embeddings,
        attention_bias=spec.attention_bias,
        attn_implementation="eager",
    )
    network = transformers.LlamaForCausalLM(config).eval()
    report = network.load_state_dict(tensors, strict=False)
    assert report.unexpected_keys == []
    assert set(report.missing_keys) <= {
        "lm_head.weight",
        *(k for k in report.missing_keys if k.endswith("o_proj.bias")),
    }
    network.tie_weights()
    return network


def whole(network: Decoder, tokens: list[int]) -> torch.Tensor:
    """Logits [tokens, vocabulary] of one sequence, with attention written out and no cache."""
    from surefoot.device.runner import norm_heads_
    from surefoot.model.layers import Attention
    from surefoot.ops.attention import attend_reference
    from surefoot.ops.norm_rope import rotate_

    spec = network.spec

    positions = torch.arange(len(tokens))

    def attend(layer: int, qkv: torch.Tensor, how: Attention) -> torch.Tensor:
        norm_heads_(qkv, how, spec.num_heads, spec.num_kv_heads)
        if how.turns is not None:
            rotate_(qkv[:, : spec.num_heads + spec.num_kv_heads], how.turns[positions])
        q, k, v = qkv.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
        return attend_reference(q, k, v, start=0, scale=how.scale).flatten(1)

    hidden = network.forward(torch.tensor(tokens), attend)
    return network.logits(hidden)


@pytest.mark.parametrize("tied", [False, True])
def test_a_small_network_equals_transformers(tied: bool) -> None:
    """Biases, grouped heads, tied and separate output projection: logits equal transformers' within rounding."""
    spec = ModelSpec(**{name: getattr(TINY, name) for name in TINY.__struct_fields__} | {"tie_word_embeddings": tied})
    tensors = dict(weights.dummy(spec, dtype=torch.float32, seed=3))
    generator = torch.Generator().manual_seed(0)
    tensors = {name: tensor + torch.randn(tensor.shape, generator=generator) * 0.2 for name, tensor in tensors.items()}
    network = Decoder.load(spec, iter(tensors.items()), device=torch.device("cpu"), dtype=torch.float32)
    tokens = list(range(1, 40))
    with torch.inference_mode():
        expected = reference(spec, tensors)(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(whole(network, tokens), expected, rtol=1e-4, atol=1e-4)


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
        Decoder.load(TINY, iter(tensors.items()), device=torch.device("cpu"), dtype=torch.float32)


def test_an_unknown_architecture_is_refused_with_those_supported() -> None:
    """The registry names what it knows."""
    assert network_class("LlamaForCausalLM") is Decoder
    with pytest.raises(CheckpointError, match=r"'NopeForCausalLM'.*LlamaForCausalLM"):
        network_class("NopeForCausalLM")


# ---- the embedded model ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedded() -> Device:
    return open_device(EngineConfig(memory=2 << 30), progress=lambda what, part: None)


@pytest.fixture(scope="module")
def transformers_model() -> Any:
    found = checkpoints.find("smollm2")
    spec = read_spec(found)
    return reference(spec, dict(weights.load(found, spec, dtype=torch.float32)))


@pytest.fixture(scope="module")
def encoded() -> list[list[int]]:
    from surefoot.api.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(checkpoints.find("smollm2"))
    return [list(tokenizer.encode(text)) for text in PROMPTS]


@pytest.fixture(scope="module")
def expected(transformers_model: Any, encoded: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of transformers' `generate`, one prompt at a time."""
    texts = []
    for tokens in encoded:
        ids = torch.tensor([tokens])
        out = transformers_model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        texts.append(out[0, len(tokens) :].tolist())
    return texts


def generate(device: Device, prompts: list[list[int]], *, chunk: int) -> list[list[Sampled]]:
    """Greedy tokens of all prompts in one batch, prompts given `chunk` tokens a step."""
    size = device.limits.block_size
    tokens = [list(prompt) for prompt in prompts]
    computed = [0] * len(prompts)
    outputs: list[list[Sampled]] = [[] for _ in prompts]
    number = 0
    while any(len(out) < TOKENS for out in outputs):
        rows = [at for at, out in enumerate(outputs) if len(out) < TOKENS]
        works = []
        for at in rows:
            given = tuple(tokens[at][computed[at] : computed[at] + chunk])
            end = computed[at] + len(given)
            works.append(
                Work(
                    request=at,
                    child=0,
                    epoch=0,
                    slot=at,
                    start=computed[at],
                    tokens=given,
                    table=tuple(at * 8 + block for block in range(-(-end // size))),
                    known=None,
                    samples=(Sample(0, 0, len(outputs[at])),) if end == len(tokens[at]) else (),
                    params=SamplingParams(temperature=0.0),
                    decoding=bool(outputs[at]),
                )
            )
        number += 1
        outcome = device.executor.collect(device.executor.launch(StepPlan(id=number, works=tuple(works))))
        assert isinstance(outcome, StepDone), outcome
        for at, work, row in zip(rows, works, outcome.rows, strict=True):
            computed[at] = work.end
            outputs[at] += row.samples
            tokens[at] += [sampled.token for sampled in row.samples]
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "chunk"), [(1, 512), (16, 512), (16, 5)])
def test_greedy_text_equals_transformers(
    embedded: Device, encoded: list[list[int]], expected: list[list[int]], batch: int, chunk: int
) -> None:
    """20 prompts, alone and batched, whole and chunked, go on as transformers' generate has them."""
    for first in range(0, len(encoded), batch):
        drawn = generate(embedded, encoded[first : first + batch], chunk=chunk)
        assert [[sampled.token for sampled in row] for row in drawn] == expected[first : first + batch]


@pytest.mark.slow
def test_logits_equal_transformers(embedded: Device, transformers_model: Any, encoded: list[list[int]]) -> None:
    """Logits of the embedded model are transformers' within 1e-4 of their scale, at every position of a long text."""
    tokens = [token for prompt in encoded for token in prompt]
    network = embedded.executor.runner.network
    assert isinstance(network, Decoder)
    with torch.inference_mode():
        theirs = transformers_model(torch.tensor([tokens])).logits[0]
    ours = whole(network, tokens)
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()
