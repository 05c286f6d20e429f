"""AsyncLLMEngine and LLM as vLLM's programs use them, with the embedded model in a real worker."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from surefoot.vllm import (
    LLM,
    AsyncEngineArgs,
    AsyncEngineDeadError,
    AsyncLLMEngine,
    EngineDeadError,
    EngineGenerateError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from tests.api.fake import eventually

pytestmark = pytest.mark.slow
PROMPT = "The capital of France is"
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6}
SMALL: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 4, "memory": "1500MiB", "dtype": "float32"}
# The smallest step that may be tried, one block of 64 tokens, runs out of memory; shorter prompts do not notice.
FAULTS: dict[str, Any] = {"block_size": 64, "allow_fault_injection": True, "faults": "execute:oom:tokens>48"}


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLMEngine]:
    made = AsyncLLMEngine.from_engine_args(AsyncEngineArgs("smollm2", **SMALL, **FAULTS))  # no loop is running here
    yield made
    made.shutdown()


async def outputs(engine: AsyncLLMEngine, prompt: Any = PROMPT, id: str = "", **fields: Any) -> list[RequestOutput]:
    params = SamplingParams(**{**GREEDY, **fields})
    return [output async for output in engine.generate(prompt, params, id or None)]


async def test_text_and_ids_are_cumulative(engine: AsyncLLMEngine) -> None:
    """Every output holds all so far; the last one is finished, and says how and how much."""
    seen = await outputs(engine, id="mine")
    texts = [output.outputs[0].text for output in seen]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    last = seen[-1]
    assert (last.request_id, last.prompt, last.finished) == ("mine", PROMPT, True)
    assert last.outputs[0].text.startswith(" Paris")
    assert (last.outputs[0].finish_reason, len(last.outputs[0].token_ids)) == ("length", 6)
    tokenizer = await engine.get_tokenizer()
    assert last.prompt_token_ids == tokenizer.encode(PROMPT)
    assert [output.finished for output in seen[:-1]] == [False] * (len(seen) - 1)
    metrics = last.metrics
    assert metrics is not None
    assert metrics.arrival_time <= (metrics.first_token_time or 0) <= (metrics.finished_time or 0)


async def test_other_kinds_of_output(engine: AsyncLLMEngine) -> None:
    """DELTA outputs add up to the cumulative text; FINAL_ONLY is one output; without detokenize there is no text."""
    whole = (await outputs(engine))[-1].outputs[0]
    deltas = await outputs(engine, output_kind=RequestOutputKind.DELTA)
    assert "".join(output.outputs[0].text for output in deltas) == whole.text
    assert [token for output in deltas for token in output.outputs[0].token_ids] == whole.token_ids
    (final,) = await outputs(engine, output_kind=RequestOutputKind.FINAL_ONLY)
    assert final.outputs[0].text == whole.text
    (bare,) = await outputs(engine, output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False)
    assert (bare.outputs[0].text, bare.outputs[0].token_ids) == ("", whole.token_ids)


async def test_prompts_in_every_shape(engine: AsyncLLMEngine) -> None:
    """A text, ids, a mapping with either, and the argument's name of 2024 give the same; ids go before text."""
    ids = (await engine.get_tokenizer()).encode(PROMPT)
    expected = (await outputs(engine))[-1].outputs[0].text
    for prompt in (ids, {"prompt": PROMPT}, {"prompt_token_ids": ids}, {"prompt": "other", "prompt_token_ids": ids}):
        assert (await outputs(engine, prompt))[-1].outputs[0].text == expected
    old = [output async for output in engine.generate(inputs=PROMPT, sampling_params=SamplingParams(**GREEDY))]
    assert old[-1].outputs[0].text == expected
    cut = (await outputs(engine, ids, truncate_prompt_tokens=2))[-1]
    assert cut.prompt_token_ids == ids[-2:]


async def test_stops_samples_and_logprobs(engine: AsyncLLMEngine) -> None:
    """n completions, stop strings with their reason, and log-probabilities are where vLLM's programs look."""
    seen = await outputs(engine, n=2, stop=["Paris"], logprobs=2)
    for index, output in enumerate(seen[-1].outputs):
        assert (output.index, output.text, output.finish_reason, output.stop_reason) == (index, " ", "stop", "Paris")
        assert output.logprobs is not None
        assert len(output.logprobs) == len(output.token_ids)
        assert output.logprobs[0][output.token_ids[0]].rank == 1


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        ("", {}), (None, {}), ([-1], {}), ([1 << 40], {}), ({"prompt": 5}, {}),
        ({"multi_modal_data": {"image": 1}}, {}),
        ("x", {"temperature": -1.0}), ("x", {"max_tokens": 10_000}), ("x", {"n": 0}), ("x" * 9000, {}),
        ("x", {"truncate_prompt_tokens": 0}), ("x", {"stop": ["a"], "detokenize": False}),
    ],
)  # fmt: skip
async def test_a_bad_request_is_a_value_error(engine: AsyncLLMEngine, prompt: Any, fields: dict[str, Any]) -> None:
    """It is raised where the outputs are awaited, and the engine knows nothing of it."""
    steps = engine._engine.client.snapshot.steps
    with pytest.raises(ValueError):
        await outputs(engine, prompt, **fields)
    assert engine._engine.client.snapshot.steps == steps
    await engine.check_health()


async def test_a_request_that_runs_out_of_memory_fails_alone(engine: AsyncLLMEngine) -> None:
    """Its generator raises; one beside it and the next ones get the text that they would have had anyway."""
    alone = (await outputs(engine))[-1].outputs[0].text
    worker = engine._engine.client.worker_pid
    failing, beside = await asyncio.gather(outputs(engine, "word " * 200), outputs(engine), return_exceptions=True)
    assert isinstance(failing, EngineGenerateError)
    assert "does not fit in memory" in str(failing)
    assert isinstance(beside, list)
    assert beside[-1].outputs[0].text == (await outputs(engine))[-1].outputs[0].text == alone
    assert engine._engine.client.worker_pid == worker
    assert (engine.errored, engine.is_running, engine.is_stopped) == (False, True, False)


async def test_leaving_and_aborting(engine: AsyncLLMEngine) -> None:
    """A generator that is closed drops its request; one that is aborted ends with finish_reason "abort"."""
    long = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0.0)
    left = engine.generate("Once", long, "left")
    await anext(left)
    await left.aclose()
    aborted = engine.generate("Once", long, "aborted")
    await anext(aborted)
    with pytest.raises(ValueError, match="running already"):
        await anext(engine.generate("Once", long, "aborted"))
    await engine.abort(["aborted", "never there"])
    rest = [output async for output in aborted]
    assert (rest[-1].finished, rest[-1].outputs[0].finish_reason) == (True, "abort")
    client = engine._engine.client
    await asyncio.to_thread(eventually, lambda: not client.in_flight and not client.snapshot.running, 30)


async def test_a_worker_that_dies_is_a_pause(engine: AsyncLLMEngine) -> None:
    """The text of a stream that runs then is that of an undisturbed one, and the engine is not errored."""
    params = {"max_tokens": 40, "ignore_eos": True}
    expected = (await outputs(engine, **params))[-1].outputs[0].text
    stream = engine.generate(PROMPT, SamplingParams(**{**GREEDY, **params}), "through")
    await anext(stream)
    os.kill(engine._engine.client.worker_pid or 0, signal.SIGKILL)
    assert [output async for output in stream][-1].outputs[0].text == expected
    await engine.check_health()


async def test_what_is_not_here_says_so(engine: AsyncLLMEngine) -> None:
    """Methods of vLLM's that cannot be honoured are errors with the reason; adapters of a request too."""
    with pytest.raises(AttributeError, match="adapters are not served"):
        engine.add_lora  # noqa: B018
    with pytest.raises(ValueError, match="lora_request"):
        await anext(engine.generate(PROMPT, SamplingParams(), "1", lora_request=object()))  # type: ignore[arg-type]
    assert (await engine.get_model_config()).max_model_len == 512
    assert not await engine.is_tracing_enabled()


async def test_another_loop_may_use_it(engine: AsyncLLMEngine) -> None:
    """An engine is not bound to the loop, or the thread, that used it first."""
    expected = (await outputs(engine))[-1].outputs[0].text
    seen = await asyncio.to_thread(lambda: asyncio.run(outputs(engine)))
    assert seen[-1].outputs[0].text == expected


def test_scripts() -> None:
    """LLM keeps the order, takes ids as in 2024 and now, chats, and marks the prompt that failed."""
    llm = LLM("smollm2", tokenizer="smollm2", **SMALL, **FAULTS)
    ids = llm.get_tokenizer().encode(PROMPT)
    params = SamplingParams(**GREEDY)
    first, failed, last = llm.generate([PROMPT, "word " * 200, {"prompt_token_ids": ids}], params)
    assert first.outputs[0].text == last.outputs[0].text
    assert first.outputs[0].text.startswith(" Paris")
    assert (failed.outputs[0].finish_reason, failed.error is None, failed.finished) == ("error", False, True)
    (old,) = llm.generate(prompt_token_ids=[ids], sampling_params=params)
    assert old.outputs[0].token_ids == first.outputs[0].token_ids
    (answer,) = llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(temperature=0.0, max_tokens=3))
    assert answer.outputs[0].text
    with pytest.raises(ValueError, match="sampling_params"):
        llm.generate([PROMPT], [params, params])
    llm.shutdown()


def test_an_engine_that_was_shut_down_is_dead() -> None:
    """Requests and health checks then raise EngineDeadError, AsyncEngineDeadError by its old name."""
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs("smollm2", **SMALL))
    engine.shutdown()
    assert AsyncEngineDeadError is EngineDeadError
    assert engine.errored
    with pytest.raises(AsyncEngineDeadError):
        asyncio.run(outputs(engine))
    with pytest.raises(EngineDeadError):
        asyncio.run(engine.check_health())


async def test_structured_outputs(engine: AsyncLLMEngine) -> None:
    """An output is what it has to be; a pattern that is wrong fails its own request."""
    choice = StructuredOutputsParams(choice=["Rome", "Lyon"])
    last = (await outputs(engine, structured_outputs=choice))[-1].outputs[0]
    assert (last.text in ("Rome", "Lyon"), last.finish_reason) == (True, "stop")
    with pytest.raises((ValueError, EngineGenerateError)):
        await outputs(engine, structured_outputs=StructuredOutputsParams(regex="("))
    assert (await outputs(engine))[-1].finished
