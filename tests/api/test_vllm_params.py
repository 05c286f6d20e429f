"""vLLM's SamplingParams and engine arguments, of both of its eras: taken, mapped, told of, or refused."""

from __future__ import annotations

import argparse
import logging
from typing import Any

import pytest

from surefoot.api import vllm_args
from surefoot.errors import ConfigError
from surefoot.types import SamplingParams as Native
from surefoot.vllm import AsyncEngineArgs, EngineArgs, RequestOutputKind, SamplingParams, StructuredOutputsParams

ORIGIN = {
    "n": 1, "best_of": 1, "presence_penalty": 1.0, "frequency_penalty": 0.0, "temperature": 0.8, "top_p": 0.8,
    "top_k": -1, "repetition_penalty": 1.0, "use_beam_search": False, "length_penalty": 1, "early_stopping": False,
    "stop_token_ids": [151329, 151336, 151338], "ignore_eos": False, "max_tokens": 8192, "logprobs": None,
    "prompt_logprobs": None, "skip_special_tokens": True,
}  # fmt: skip


def test_the_defaults_are_vllms() -> None:
    """Parameters that are not given mean what they mean there: 16 tokens, the model's own distribution."""
    assert SamplingParams().native() == Native()
    assert (SamplingParams().max_tokens, SamplingParams().temperature) == (16, 1.0)


def test_the_fields_of_2024_arrive() -> None:
    """What the origin program asks for is what our engine is asked for; beam search that is off asks for nothing."""
    native = SamplingParams(**ORIGIN).native()
    assert (native.temperature, native.top_p, native.top_k, native.max_tokens) == (0.8, 0.8, -1, 8192)
    assert (native.presence_penalty, native.stop_token_ids) == (1.0, (151329, 151336, 151338))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 3), ("use_beam_search", True), ("length_penalty", 2.0), ("early_stopping", True),
        ("logits_processors", [print]), ("thinking_token_budget", 10), ("extra_args", {"a": 1}),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_a_value_error(field: str, value: Any) -> None:
    """A field that would change the output, and does not here, is refused by its name, set early or late."""
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})
    params = SamplingParams()
    setattr(params, field, value)
    with pytest.raises(ValueError, match=field):
        params.native()


def test_a_field_that_nobody_has_is_a_type_error() -> None:
    """A mistyped name does not become a default."""
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)


def test_none_is_nothing_and_one_string_is_a_list() -> None:
    """None, an empty list and a single stop string are what they are in vLLM."""
    native = SamplingParams(stop=None, stop_token_ids=None, logit_bias={3: 1.5}, top_k=None, seed=-1).native()
    assert (native.stop, native.stop_token_ids, native.logit_bias) == ((), (), ((3, 1.5),))
    assert (native.top_k, native.seed) == (0, None)


def test_a_copy_can_be_changed() -> None:
    """clone and from_optional make parameters of their own; equal ones are equal."""
    first = SamplingParams(max_tokens=5, output_kind=RequestOutputKind.DELTA)
    other = first.clone()
    assert first == other
    other.max_tokens = 6
    assert (first.max_tokens, other != first) == (5, True)
    assert SamplingParams.from_optional(max_tokens=None, temperature=0.0) == SamplingParams(temperature=0.0)
    assert repr(other) == f"SamplingParams(max_tokens=6, output_kind={RequestOutputKind.DELTA!r})"


# ---- engine arguments -----------------------------------------------------------------------------------------------


def test_the_arguments_of_2024_arrive(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that mean something are settings; each of those that change nothing is told of, once for all engines."""
    monkeypatch.setattr(vllm_args, "_told", set())
    args = AsyncEngineArgs(
        model="./model", tokenizer="./model", tensor_parallel_size=1, dtype="bfloat16", trust_remote_code=True,
        gpu_memory_utilization=0.4, enforce_eager=True, worker_use_ray=False, disable_log_requests=True,
        max_model_len=128000,
    )  # fmt: skip
    with caplog.at_level(logging.WARNING):
        config = args.config()
        args.config()
    assert (config.model, config.dtype, config.max_model_len) == ("./model", "bfloat16", 128_000)
    assert (config.gpu_memory_utilization, config.trust_remote_code) == (0.4, True)
    assert [record.message.split()[0] for record in caplog.records] == ["enforce_eager", "disable_log_requests"]


def test_defaults_are_silent_and_fitted(caplog: pytest.LogCaptureFixture) -> None:
    """Arguments that nobody gave say nothing, and leave the sizes to what fits."""
    config = EngineArgs().config()
    assert (config.model, config.max_model_len, config.memory, caplog.records) == ("smollm2", None, None, [])


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("pipeline_parallel_size", 2), ("worker_use_ray", True), ("enable_lora", True), ("kv_cache_dtype", "fp8_e5m2"),
        ("tokenizer", "other"), ("revision", "abc"), ("cpu_offload_gb", 4), ("dtype", "int3"), ("max_num_seqs", 0),
        ("seed", -1),
    ],
)  # fmt: skip
def test_an_argument_that_cannot_be_honoured_is_an_error_when_used(argument: str, value: Any) -> None:
    """Making an engine fails with the argument's name; attributes may be changed until then."""
    args = EngineArgs(**{argument: value})
    with pytest.raises(ConfigError, match=argument):
        args.config()
    setattr(args, argument, getattr(EngineArgs(), argument))
    args.config()


def test_an_argument_that_nobody_has_is_a_type_error() -> None:
    """With the name that may have been meant."""
    with pytest.raises(TypeError, match=r"max_model_length.*max_model_len"):
        EngineArgs(max_model_length=4096)


def test_how_many_may_wait() -> None:
    """Without bound as in vLLM, unless it is given by its name there or by ours."""
    assert EngineArgs().policy().max_queued_requests > 1 << 40
    assert EngineArgs(max_num_queued_reqs=7).policy().max_queued_requests == 7
    assert EngineArgs(max_queued_requests=8).policy().max_queued_requests == 8
    with pytest.raises(ConfigError, match="max_queued_requests"):
        EngineArgs(max_queued_requests="x").policy()


def test_a_command_line_of_a_program() -> None:
    """add_cli_args and from_cli_args work with an argparse parser that has options of its own."""
    parser = AsyncEngineArgs.add_cli_args(argparse.ArgumentParser())
    parser.add_argument("--host", default="::1")
    line = "--model ./m --max-model-len 4K --enforce-eager --dtype half --no-enable-prefix-caching --host x"
    args = AsyncEngineArgs.from_cli_args(parser.parse_args(line.split()))
    assert (args.model, args.enforce_eager) == ("./m", True)
    config = args.config()
    assert (config.dtype, config.max_model_len, config.enable_prefix_caching) == ("float16", 4096, False)


# ---- structured outputs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["structured_outputs", "guided_decoding"])
@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json", {"type": "object"}), ("json", '{"type": "object"}'), ("regex", "a+"), ("choice", ["a", "b"]),
        ("grammar", 'root ::= "a"'), ("json_object", True),
    ],
)  # fmt: skip
def test_what_an_output_has_to_be(field: str, kind: str, value: Any) -> None:
    """Each kind, under the name of 2024 and today's, is a grammar of our engine."""
    wanted = StructuredOutputsParams(**{kind: value})
    grammar = SamplingParams(**{field: wanted}).native().grammar
    assert grammar is not None
    assert grammar.field == field


def test_structured_outputs_that_are_wrong() -> None:
    """None, several, what is not honoured, and what is no StructuredOutputsParams are errors."""
    for fields in ({}, {"regex": "a", "json_object": True}, {"regex": "a", "whitespace_pattern": " "}):
        with pytest.raises(ValueError):
            StructuredOutputsParams(**fields)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="pattern"):
        StructuredOutputsParams(pattern="a")
    with pytest.raises(ValueError, match="structured_outputs"):
        SamplingParams(structured_outputs={"regex": "a"}).native()
