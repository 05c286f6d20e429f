"""Weights from disk, against the gguf package's dequantization and transformers' loading."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import asdict
from safetensors.torch import save_file

from surefoot.checkpoint import Checkpoint, find
from surefoot.errors import CheckpointError
from surefoot.gguf import BLOCKS, read_header
from surefoot.model.layout import gguf_names
from surefoot.model.quants import unpack
from surefoot.model.weights import dummy, expected_names, load
from surefoot.spec import ModelSpec, read_spec, tensor_shapes

oracle = pytest.importorskip("gguf")
Tensors = dict[str, torch.Tensor]

SPEC = ModelSpec(
    architecture="LlamaForCausalLM", vocab_size=96, token_count=96, hidden_size=64, intermediate_size=96, num_layers=2,
    num_heads=4, num_kv_heads=2, head_dim=16, max_position=128, rms_norm_eps=1e-5, rope_theta=1e4,
    tie_word_embeddings=False, attention_bias=False, eos_token_ids=(2,), bos_token_id=1, dtype="float32",
)  # fmt: skip
TIED = ModelSpec(**asdict(SPEC) | {"tie_word_embeddings": True})


@pytest.fixture
def weights() -> Tensors:
    return dict(dummy(SPEC, dtype=torch.float32, seed=3))


def save(folder: Path, tensors: Tensors, name: str = "model.safetensors") -> Checkpoint:
    save_file(tensors, folder / name)
    return Checkpoint(kind="hf", path=folder, name="tiny")


def save_shards(folder: Path, tensors: Tensors, weight_map: dict[str, str]) -> Checkpoint:
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map.get(name) == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return Checkpoint(kind="hf", path=folder, name="tiny")


def halves(tensors: Tensors) -> dict[str, str]:
    return {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(tensors)}


def loaded(checkpoint: Checkpoint, spec: ModelSpec = SPEC, dtype: torch.dtype = torch.float32) -> Tensors:
    pairs = list(load(checkpoint, spec, dtype=dtype))
    assert len({name for name, _ in pairs}) == len(pairs)
    return dict(pairs)


def assert_same(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


# ---- safetensors


@pytest.mark.parametrize("sharded", [False, True])
def test_safetensors_come_back_unchanged(tmp_path: Path, weights: Tensors, sharded: bool) -> None:
    """One file or several with an index: every tensor is yielded once under its own name."""
    checkpoint = save_shards(tmp_path, weights, halves(weights)) if sharded else save(tmp_path, weights)
    assert_same(loaded(checkpoint), weights)


def test_dtype_is_cast_while_loading(tmp_path: Path, weights: Tensors) -> None:
    """bfloat16 and float16 files load as float32, and float32 ones as bfloat16."""
    for stored in (torch.bfloat16, torch.float16):
        checkpoint = save(tmp_path, {name: tensor.to(stored) for name, tensor in weights.items()})
        assert_same(loaded(checkpoint), {name: tensor.to(stored).float() for name, tensor in weights.items()})
    checkpoint = save(tmp_path, weights)
    assert_same(loaded(checkpoint, dtype=torch.bfloat16), {name: tensor.bfloat16() for name, tensor in weights.items()})


def test_tensors_own_their_memory(tmp_path: Path, weights: Tensors) -> None:
    """A file that is overwritten after loading does not reach into tensors that were loaded."""
    checkpoint = save(tmp_path, weights)
    found = loaded(checkpoint)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(4096)
        file.write(bytes(8192))
    assert_same(found, weights)


def test_what_carries_nothing_is_ignored(tmp_path: Path, weights: Tensors) -> None:
    """Rotary frequencies are computed anyway, and a tied model's lm_head is its embedding."""
    extra = weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    assert_same(loaded(save(tmp_path, extra)), weights)
    tied = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
    assert_same(loaded(save(tmp_path, extra), TIED), tied)
    assert_same(loaded(save(tmp_path, tied), TIED), tied)


def test_progress_counts_bytes(tmp_path: Path, weights: Tensors) -> None:
    """progress is told bytes done and in all after each tensor, and ends at all of them."""
    calls: list[tuple[int, int, str]] = []
    names = [
        name
        for name, _ in load(
            save(tmp_path, weights), SPEC, dtype=torch.float32, progress=lambda *args: calls.append(args)
        )
    ]
    total = 4 * SPEC.parameters
    assert [name for *_, name in calls] == names
    assert calls[-1][:2] == (total, total)
    assert all(before[0] < after[0] for before, after in itertools.pairwise(calls))


def drop(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def put(name: str, tensor: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__setitem__(name, tensor)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (drop("model.norm.weight"), r"tensor model\.norm\.weight is missing"),
        (drop("lm_head.weight"), r"tensor lm_head\.weight is missing"),
        (put("model.extra.weight", torch.ones(2)), r"model\.extra\.weight is not part of LlamaForCausalLM"),
        (put("model.norm.weight", torch.ones(63)), r"model\.norm\.weight has shape \[63\].*\[64\]"),
        (put("model.norm.weight", torch.ones(64, dtype=torch.int8)), r"model\.norm\.weight has type I8"),
    ],
)
def test_a_tensor_that_differs_is_named(
    tmp_path: Path, weights: Tensors, change: Callable[[Tensors], None], said: str
) -> None:
    """A missing, unexpected, misshapen or unreadable tensor is an error naming it, before any tensor is yielded."""
    change(weights)
    with pytest.raises(CheckpointError, match=said):
        next(load(save(tmp_path, weights), SPEC, dtype=torch.float32))


def test_a_tensor_in_two_shards_is_named(tmp_path: Path, weights: Tensors) -> None:
    """The same name in two shards is an error naming the tensor and both files."""
    weight_map = halves(weights)
    checkpoint = save_shards(tmp_path, weights, weight_map)
    first, second = sorted(set(weight_map.values()))
    twice = next(name for name, file in weight_map.items() if file == first)
    save_file(
        {name: weights[name] for name in weights if weight_map[name] == second or name == twice}, tmp_path / second
    )
    with pytest.raises(CheckpointError, match=f"{second}: tensor {twice} is there twice, first in .*{first}"):
        loaded(checkpoint)


def test_an_index_that_does_not_hold(tmp_path: Path, weights: Tensors) -> None:
    """A shard that is missing, a tensor that its shard lacks, and an empty index are errors naming the file."""
    weight_map = halves(weights)
    checkpoint = save_shards(tmp_path, weights, weight_map)
    index = tmp_path / "model.safetensors.index.json"
    first, second = sorted(set(weight_map.values()))
    moved = next(name for name, file in weight_map.items() if file == second)
    index.write_text(json.dumps({"weight_map": weight_map | {moved: first}}))
    with pytest.raises(CheckpointError, match=f"{first}: tensor {moved} is missing, though"):
        loaded(checkpoint)
    index.write_text(json.dumps({"weight_map": weight_map | {"x": "gone.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"gone\.safetensors: the file is missing"):
        loaded(checkpoint)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="weight_map is missing"):
        loaded(checkpoint)


def test_a_truncated_file_is_named(tmp_path: Path, weights: Tensors) -> None:
    """A safetensors file cut off anywhere is an error naming the file."""
    checkpoint = save(tmp_path, weights)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    for size in (0, 4, 200, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated"):
            loaded(checkpoint)


def test_several_files_without_an_index(tmp_path: Path, weights: Tensors) -> None:
    """One file of any name will do; of several it is not guessed which one counts."""
    assert_same(loaded(save(tmp_path, weights, "weights.safetensors")), weights)
    checkpoint = save(tmp_path, weights, "more.safetensors")
    with pytest.raises(CheckpointError, match=r"Found: more\.safetensors, weights\.safetensors"):
        loaded(checkpoint)


# ---- dummy


def test_dummy_weights() -> None:
    """Dummy weights fill every shape, repeat with their seed, and have norms of one."""
    first, second, other = (dict(dummy(SPEC, dtype=torch.bfloat16, seed=seed)) for seed in (1, 1, 2))
    assert_same(first, second)
    assert first.keys() == expected_names(SPEC)
    assert {name: tuple(tensor.shape) for name, tensor in first.items()} == tensor_shapes(SPEC)
    embedding = first["model.embed_tokens.weight"]
    assert not torch.equal(embedding, other["model.embed_tokens.weight"])
    assert embedding.dtype == torch.bfloat16
    assert 0.015 < embedding.float().std().item() < 0.025
    assert first["model.norm.weight"].eq(1).all()


def test_dummy_weights_of_gemma_norm_by_one() -> None:
    """Where norms add 1 to their weight, a dummy weight is 0; biases are 0 too."""
    spec = ModelSpec(**asdict(SPEC) | {"norm_offset": 1.0, "qk_norm": True, "attention_bias": True})
    found = dict(dummy(spec, dtype=torch.float32))
    for name in ("model.norm.weight", "model.layers.0.self_attn.q_norm.weight", "model.layers.0.self_attn.k_proj.bias"):
        assert found[name].eq(0).all(), name


@pytest.mark.slow
def test_host_memory_is_one_file_at_a_time(tmp_path: Path) -> None:
    """Loading, and dropping each tensor, holds the mapped file and a tensor, however many files there are."""
    sizes = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 4096, "head_dim": 128}
    tensors = dict(dummy(ModelSpec(**asdict(SPEC) | sizes | {"num_layers": 6}), dtype=torch.float32))
    weight_map = {name: f"model-{name.split('.')[2] if 'layers' in name else 6}.safetensors" for name in tensors}
    save_shards(tmp_path, tensors, weight_map)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG_OF_SPEC | sizes | {"num_hidden_layers": 6}))
    files = [path.stat().st_size for path in tmp_path.glob("*.safetensors")]
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    freed_at_once = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}  # else malloc keeps some, now and then many
    done = subprocess.run(command, env=freed_at_once, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    tensor = 4 * 4096 * 512
    assert int(done.stdout) < max(files) + 2 * tensor + (8 << 20) < sum(files) / 2


CONFIG_OF_SPEC = {
    "architectures": ["LlamaForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "torch_dtype": "float32",
}  # fmt: skip
MEASURE = """
import sys, psutil, torch
from surefoot.checkpoint import find
from surefoot.model.weights import load
from surefoot.spec import read_spec

process, peak = psutil.Process(), []
checkpoint = find(sys.argv[1])
spec = read_spec(checkpoint)
before = process.memory_info().rss
for _ in load(checkpoint, spec, dtype=torch.float32, progress=lambda *_: peak.append(process.memory_info().rss)):
    peak.append(process.memory_info().rss)
print(max(peak) - before)
"""


# ---- GGUF

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "model.layers.": "blk.",
}  # fmt: skip


def rotate(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of rows: the two halves of each head interleaved."""
    rows = [tensor[head * 16 + half * 8 + index] for head in range(heads) for index in range(8) for half in range(2)]
    return torch.stack(rows)


def gguf_tensors(weights: Tensors, kind: Any) -> dict[str, Any]:
    """`weights` as a llama.cpp converter stores them, matrices packed as `kind`."""
    stored: dict[str, Any] = {}
    for name, tensor in weights.items():
        if "q_proj" in name or "k_proj" in name:
            tensor = rotate(tensor, SPEC.num_heads if "q_proj" in name else SPEC.num_kv_heads)
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        array = np.ascontiguousarray(tensor.numpy())
        packed = tensor.ndim == 2 and kind != oracle.GGMLQuantizationType.F32
        stored[name] = (oracle.quants.quantize(array, kind), kind) if packed else array
    return stored


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_gguf_equals_the_reference(write_gguf: Any, weights: Tensors, kind: str) -> None:
    """Every readable type unpacks to exactly what the gguf package unpacks, q and k in Hugging Face's row order."""
    number = oracle.GGMLQuantizationType[kind]
    checkpoint = Checkpoint(kind="gguf", path=write_gguf({}, gguf_tensors(weights, number)), name="tiny")
    wanted = {}
    for name, tensor in weights.items():
        array = tensor.numpy()
        if tensor.ndim == 2:
            array = oracle.quants.dequantize(oracle.quants.quantize(array, number), number)
        wanted[name] = torch.from_numpy(array.copy())
    assert_same(loaded(checkpoint), wanted)


@pytest.mark.parametrize(("kind", "scales"), [("Q4_K", (0, 2)), ("Q6_K", (208,))])
def test_blocks_of_256_equal_the_reference(kind: str, scales: tuple[int, ...]) -> None:
    """Random blocks unpack to exactly what the gguf package makes of them, over the borders of our chunks."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (1100, BLOCKS[kind][1]), dtype=np.uint8)
    for at in scales:  # random bytes would make scales that are not finite
        blocks[:, at : at + 2] = rng.normal(size=(1100, 1)).astype(np.float16).view(np.uint8)
    wanted = oracle.quants.dequantize(blocks, oracle.GGMLQuantizationType[kind])
    assert np.array_equal(unpack(blocks.reshape(-1), kind), wanted.reshape(-1))


def test_gguf_tensor_that_differs_is_named(write_gguf: Any, weights: Tensors) -> None:
    """A tensor that the model lacks and one that the file lacks are named."""
    stored = gguf_tensors(weights, oracle.GGMLQuantizationType.F32)
    extra = write_gguf({}, stored | {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}, name="extra.gguf")
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_sinks\.weight is not part of"):
        loaded(Checkpoint(kind="gguf", path=extra, name="tiny"))
    del stored["blk.1.ffn_up.weight"], stored["blk.0.ffn_up.weight"]
    path = write_gguf({}, stored, name="less.gguf")
    with pytest.raises(CheckpointError, match=r"tensor blk\.0\.ffn_up\.weight and 1 more are missing"):
        loaded(Checkpoint(kind="gguf", path=path, name="tiny"))


@pytest.mark.slow
def test_embedded_model_loads_whole() -> None:
    """The embedded model holds every tensor its spec asks for, unpacked as the gguf package unpacks them."""
    checkpoint = find("smollm2")
    spec = read_spec(checkpoint)
    found = loaded(checkpoint, spec)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == tensor_shapes(spec)
    data = np.memmap(checkpoint.path, np.uint8, "r")
    infos = {info.name: info for info in read_header(checkpoint.path).tensors}
    for name in ("blk.0.ffn_up.weight", "blk.29.attn_v.weight", "output_norm.weight"):
        info = infos[name]
        raw = np.array(data[info.offset : info.offset + info.nbytes])
        wanted = oracle.quants.dequantize(raw, oracle.GGMLQuantizationType[info.type]).reshape(info.shape)
        assert np.array_equal(found[gguf_names(spec)[name][0]].numpy(), wanted), name


@pytest.mark.slow
def test_gguf_equals_transformers(write_gguf: Any, weights: Tensors) -> None:
    """transformers' own dequantized load of the same GGUF has the same tensors, bit for bit."""
    transformers = pytest.importorskip("transformers")
    metadata = {
        "llama.embedding_length": SPEC.hidden_size,
        "llama.feed_forward_length": SPEC.intermediate_size,
        "llama.block_count": SPEC.num_layers,
        "llama.attention.head_count": SPEC.num_heads,
        "llama.attention.head_count_kv": SPEC.num_kv_heads,
        "llama.context_length": SPEC.max_position,
        "llama.vocab_size": SPEC.vocab_size,
        "llama.attention.layer_norm_rms_epsilon": SPEC.rms_norm_eps,
        "tokenizer.ggml.tokens": [f"t{index}" for index in range(SPEC.vocab_size)],
    }
    path = write_gguf(metadata, gguf_tensors(weights, oracle.GGMLQuantizationType.Q4_1))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent),
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    checkpoint = find(str(path))
    assert_same(loaded(checkpoint, read_spec(checkpoint)), dict(model.state_dict()))


@pytest.mark.slow
def test_directory_written_by_transformers(tmp_path: Path) -> None:
    """A sharded checkpoint and config.json saved by the installed transformers load as they are."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}, attention_bias=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    checkpoint = find(str(tmp_path))
    spec = read_spec(checkpoint)
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert (spec.rope_theta, spec.attention_bias, spec.head_dim) == (5e5, True, 16)
    assert_same(loaded(checkpoint, spec), dict(model.state_dict()))
