"""Memory arithmetic."""

from __future__ import annotations

import pytest

from surefoot import plan as planning
from surefoot.config import GIB, MIB, EngineConfig
from surefoot.errors import ConfigError, DoesNotFit
from surefoot.spec import Experts, ModelSpec

SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    token_count=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position=8192,
    rms_norm_eps=1e-5,
    rope_theta=100000.0,
    tie_word_embeddings=True,
    attention_bias=False,
    eos_token_ids=(2,),
    bos_token_id=1,
    dtype="bfloat16",
)
MACHINE = planning.MachineMemory(total=24 * GIB, free=20 * GIB)


def fit(
    config: EngineConfig | None = None, machine: planning.MachineMemory = MACHINE, **where: str
) -> planning.MemoryPlan:
    where = {"device": "cpu", "dtype": "float32"} | where
    return planning.plan_memory(SPEC, config or EngineConfig(), machine, **where)


def test_the_parts_fill_the_budget_and_no_more() -> None:
    """Weights, activations, logits, reserve and KV cache together stay within the budget, to a block."""
    plan = fit(EngineConfig(memory=2 * GIB))
    assert plan.budget - plan.block_bytes < plan.taken <= plan.budget == 2 * GIB
    assert plan.fixed + plan.kv == plan.taken == sum(size for _, size, _ in plan.rows())


def test_defaults() -> None:
    """A CPU's defaults are 4 GiB (less where less is free), 512 tokens, 16 sequences; a GPU's all but 1 GiB."""
    cpu = fit()
    assert (cpu.budget, cpu.max_num_batched_tokens, cpu.max_num_seqs, cpu.block_size) == (4 * GIB, 512, 16, 16)
    assert fit(machine=planning.MachineMemory(total=24 * GIB, free=3 * GIB)).budget == 2 * GIB
    gpu = fit(device="cuda", dtype="bfloat16")
    assert (gpu.budget, gpu.max_num_batched_tokens, gpu.max_num_seqs, gpu.block_size) == (19 * GIB, 2048, 256, 128)


def test_a_gpu_holds_eight_bits_alone() -> None:
    """106.2 M numbers of layers and 28.3 M of the projection in a byte each, the embedding in two; 64 MiB unpacked."""
    for kind in ("int8", "fp8"):
        plan = fit(EngineConfig(quantization=kind), device="cuda", dtype="bfloat16")
        assert plan.weights == pytest.approx(134_479_872 + 28_346_688 * 2 + 64 * MIB, rel=0.02)
        assert plan.dtype == f"bfloat16 + {kind}"


def test_a_cpu_holds_the_output_projection_twice() -> None:
    """In float32 on CPU the repacked projection lies beside the embedding: 134.5 M numbers, and 28.3 M again."""
    assert fit().weights == pytest.approx((134_515_008 + 28_311_552) * 4, rel=0.01)
    assert fit(dtype="bfloat16").weights == pytest.approx(134_515_008 * 2, rel=0.01)


def test_the_cache_never_holds_more_than_all_sequences_need() -> None:
    """KV stops at max_num_seqs x max_model_len."""
    plan = fit(EngineConfig(max_num_seqs=2, max_model_len=100))
    assert plan.num_blocks == 2 * 7


def test_context_is_fitted_to_the_cache_with_a_note() -> None:
    """Where the cache holds less than one full context, the context shrinks and the plan says so."""
    plan = fit(EngineConfig(memory=860 * MIB))
    assert 256 <= plan.max_model_len == plan.kv_tokens < 8192
    assert any("max_model_len" in note for note in plan.notes)
    assert "max_model_len" in str(plan)


def test_a_context_beyond_the_model_is_refused_with_both_numbers() -> None:
    """max_model_len above the model's last position is a ConfigError."""
    with pytest.raises(ConfigError, match=r"9000.*8192"):
        fit(EngineConfig(max_model_len=9000))


def test_a_step_shrinks_before_the_start_is_refused() -> None:
    """The chunk, the number of sequences and the context are halved until one sequence of 256 tokens fits."""
    plan = fit(EngineConfig(memory=800 * MIB, max_num_batched_tokens=8192, max_num_seqs=256))
    assert plan.max_num_batched_tokens < 8192
    assert any(
        note.startswith(f"max_num_batched_tokens is {plan.max_num_batched_tokens}, not 8192") for note in plan.notes
    )


def test_what_cannot_fit_is_refused_with_the_numbers() -> None:
    """Weights and one sequence of 256 tokens without room are DoesNotFit, with need, budget and what is free."""
    with pytest.raises(DoesNotFit, match=r"(?s)needs .* MiB .*weights 623.*budget is 300.0 MiB.*20.00 GiB free"):
        fit(EngineConfig(memory=300 * MIB))


def test_the_table_names_every_row() -> None:
    """A printed plan shows each part with its size."""
    text = str(fit())
    for name in ("weights", "activations", "logits", "reserve", "KV cache", "budget"):
        assert name in text


def test_a_larger_step_costs_more() -> None:
    """The prediction grows with every one of its arguments."""
    cost = fit().cost
    small = {"tokens": 1, "logit_rows": 1, "longest": 100, "gathered": 100}
    for name, value in small.items():
        assert cost.bytes(**small | {name: value * 10}) > cost.bytes(**small)


def test_weights_count_every_expert() -> None:
    """A mixture of experts takes room for all of them, asked or not, and not for the MLP that they replace."""
    experts = Experts(count=8, per_token=2, intermediate_size=768, normalize=True, layers=tuple(range(15)))
    spec = ModelSpec(**{name: getattr(SPEC, name) for name in SPEC.__struct_fields__} | {"experts": experts})
    matrices, other = planning.parameters(spec)
    dense = planning.parameters(SPEC)
    assert other == dense[1]
    assert matrices - dense[0] == 15 * (8 * 3 * 768 * 576 + 8 * 576 - 3 * 1536 * 576)
