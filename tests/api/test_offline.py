"""The offline `LLM`, with the real embedded model in a real worker."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

import surefoot
from surefoot import LLM, SamplingParams, grammar
from surefoot.errors import ConfigError, EngineFailure, InvalidRequest, ModelNotFound

pytestmark = pytest.mark.slow
GREEDY = SamplingParams(temperature=0, max_tokens=5)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2", max_model_len=512, max_num_seqs=4, memory="1500MiB") as model:
        yield model


def text(llm: LLM, prompt: str | list[int], params: SamplingParams = GREEDY) -> str:
    (output,) = llm.generate(prompt, params)
    assert output.error is None
    return output.outputs[0].text


def test_one_prompt_of_text(llm: LLM) -> None:
    """A string is one prompt; its output carries the prompt, the ids, the text and how it ended."""
    (result,) = llm.generate("The capital of France is", GREEDY)
    (output,) = result.outputs
    assert output.text.startswith(" Paris")
    assert result.prompt == "The capital of France is"
    assert result.prompt_token_ids == llm.tokenizer.encode("The capital of France is")
    assert llm.tokenizer.decode(output.token_ids) == output.text
    assert (output.index, output.finish_reason, output.stop_reason, len(output.token_ids)) == (0, "length", None, 5)


def test_a_call_without_parameters(llm: LLM) -> None:
    """The model's own recommendation is used; the embedded model makes none, which leaves vLLM's defaults."""
    assert llm.default_sampling_params == SamplingParams()
    (result,) = llm.generate("Hello")
    assert len(result.outputs[0].token_ids) <= SamplingParams().max_tokens


def test_many_prompts_keep_their_order(llm: LLM) -> None:
    """Outputs are in the order of the prompts, and each is what the prompt gives alone."""
    prompts = ["The capital of France is", "Two and two is", "Water", "My name is"]
    batch = [result.outputs[0].text for result in llm.generate(prompts, GREEDY)]
    assert batch == [text(llm, prompt) for prompt in prompts]


def test_token_ids_are_a_prompt(llm: LLM) -> None:
    """A list of ids is one prompt, a list of such lists is several."""
    ids = llm.tokenizer.encode("The capital of France is")
    expected = text(llm, "The capital of France is")
    assert text(llm, ids) == expected
    assert [result.outputs[0].text for result in llm.generate([ids, ids], GREEDY)] == [expected] * 2


def test_parameters_per_prompt(llm: LLM) -> None:
    """A list of parameters goes with the prompts one to one; another length is refused."""
    short, long = (SamplingParams(temperature=0, max_tokens=count) for count in (2, 5))
    results = llm.generate(["The sun", "The sun"], [short, long])
    assert [len(result.outputs[0].token_ids) for result in results] == [2, 5]
    with pytest.raises(InvalidRequest, match="2 sampling parameters were given for 1 prompts"):
        llm.generate(["The sun"], [short, long])


def test_several_completions_of_one_prompt(llm: LLM) -> None:
    """n children come in order of their index; the same seed gives the same texts again."""
    params = SamplingParams(n=3, seed=7, max_tokens=6)
    first, again = (llm.generate("A story:", params)[0].outputs for _ in range(2))
    assert [output.index for output in first] == [0, 1, 2]
    assert [output.text for output in first] == [output.text for output in again]
    assert len({output.text for output in first}) > 1


def test_stop_strings_end_the_text(llm: LLM) -> None:
    """The text ends before the stop string, which is the stop_reason."""
    (output,) = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=20, stop=("aris",)))[
        0
    ].outputs
    assert (output.text, output.finish_reason, output.stop_reason) == (" P", "stop", "aris")


def test_logprobs(llm: LLM) -> None:
    """There is an entry per token with the drawn one in it, ranked, and their sum is the cumulative one."""
    (output,) = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=3, logprobs=2))[
        0
    ].outputs
    assert output.logprobs is not None and len(output.logprobs) == 3
    chosen = [entry[token] for entry, token in zip(output.logprobs, output.token_ids, strict=True)]
    assert [entry.rank for entry in chosen] == [1, 1, 1]
    assert output.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in chosen))
    assert "".join(entry.decoded_token for entry in chosen) == output.text


def test_chat(llm: LLM) -> None:
    """A conversation is rendered with the model's template and answered; several are answered each."""
    question = [{"role": "user", "content": "Say hello."}]
    (one,) = llm.chat(question, GREEDY)
    assert one.prompt is not None and "<|im_start|>user\nSay hello." in one.prompt
    assert [result.outputs[0].text for result in llm.chat([question, question], GREEDY)] == [one.outputs[0].text] * 2


def test_stream_is_the_text_in_pieces(llm: LLM) -> None:
    """The pieces of a stream add up to what generate returns."""
    pieces = list(llm.stream("The capital of France is", GREEDY))
    assert len(pieces) > 1
    assert "".join(pieces) == text(llm, "The capital of France is")


def test_closing_a_stream_cancels_it(llm: LLM) -> None:
    """A stream that is left early frees its place in the engine."""
    with closing(llm.stream("Once", SamplingParams(max_tokens=400, ignore_eos=True))) as pieces:  # type: ignore[type-var]
        next(pieces)
    deadline = time.monotonic() + 10
    while llm._engine.client.snapshot.running and time.monotonic() < deadline:
        time.sleep(0.02)
    assert llm._engine.client.in_flight == llm._engine.client.snapshot.running == 0


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ("", GREEDY, "prompt"),
        ([[]], GREEDY, "prompt"),
        ([10**6], GREEDY, "prompt"),
        ("Hi", SamplingParams(temperature=-1), "temperature"),
        ("Hi", SamplingParams(max_tokens=5000), "max_tokens"),
        ("Hi " * 2000, GREEDY, "prompt"),
    ],
)
def test_bad_requests_are_refused_before_they_run(llm: LLM, prompt: object, params: SamplingParams, field: str) -> None:
    """What is wrong raises InvalidRequest naming the field, and the engine sees nothing of it."""
    steps = llm._engine.client.snapshot.steps
    with pytest.raises(InvalidRequest) as refused:
        llm.generate(prompt, params)  # type: ignore[arg-type]
    assert refused.value.param is not None and refused.value.param.startswith(field)
    assert llm._engine.client.snapshot.steps == steps


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        (None, GREEDY, "prompt is a text or a list"),
        (5, GREEDY, "prompt is a text or a list"),
        (b"bytes", GREEDY, "prompt is a text or a list"),
        (["text", 5], GREEDY, "prompt is a text or a list"),
        ([5, "text"], GREEDY, "integer"),
        ("Hi", {"max_tokens": 3, "seed": 1}, "are SamplingParams"),
        ("Hi", ["max_tokens"], "are SamplingParams"),
    ],
)
def test_things_of_another_kind_are_refused(llm: LLM, prompt: object, params: object, message: str) -> None:
    """What is no prompt or no parameters raises InvalidRequest that says what would be."""
    with pytest.raises(InvalidRequest, match=message):
        llm.generate(prompt, params)  # type: ignore[arg-type]


@pytest.mark.parametrize("messages", ["Hello", None, ["Hello"], [["Hello"]], [{"role": "user", "content": "a"}, "b"]])
def test_what_is_no_conversation_is_refused(llm: LLM, messages: object) -> None:
    """A chat takes lists of messages only, and says so."""
    with pytest.raises(InvalidRequest, match="conversation is a list"):
        llm.chat(messages, GREEDY)  # type: ignore[arg-type]


def test_a_forked_child_is_refused_and_leaves_the_engine_alone(llm: LLM) -> None:
    """In a fork the parent's LLM raises at once, also on close; the parent goes on as before."""
    before = text(llm, "The capital of France is")
    child = os.fork()
    if child == 0:
        refused = False
        try:
            llm.generate("Hi", GREEDY, use_progress=False)
        except EngineFailure as error:
            refused = "fork" in error.message
        llm.close()
        os._exit(0 if refused else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert text(llm, "The capital of France is") == before


def test_max_tokens_none_goes_to_the_end_of_the_context(llm: LLM) -> None:
    """Without max_tokens the output may fill the context."""
    ids = llm.tokenizer.encode("word " * 2000)[:503]
    (result,) = llm.generate([ids], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert len(result.outputs[0].token_ids) == 512 - 503


def test_options_and_models_are_checked_before_a_process_starts() -> None:
    """A mistyped option or model raises at once."""
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM("smollm2", max_model_length=10)
    with pytest.raises(ModelNotFound):
        LLM("no/such/model")


def test_a_plain_script_needs_no_main_guard_and_leaves_nothing(tmp_path: Path) -> None:
    """A script without `if __name__ == "__main__"` and without close works, and its worker goes with it."""
    script = tmp_path / "script.py"
    script.write_text(
        "from surefoot import LLM, SamplingParams\n"
        "llm = LLM(max_model_len=256, max_num_seqs=1)\n"
        "result = llm.generate('The capital of France is', SamplingParams(temperature=0, max_tokens=1))[0]\n"
        "print(result.outputs[0].text, llm._engine.client.worker_pid, sep='|')\n"
    )
    environ = os.environ | {"PYTHONPATH": str(Path(surefoot.__file__).parents[1])}
    command = [sys.executable, str(script)]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100, check=True)
    answer, pid = result.stdout.split("|")
    assert answer == " Paris"
    assert "Traceback" not in result.stderr and "Task" not in result.stderr
    assert not psutil.pid_exists(int(pid))


def test_a_closed_llm_says_so() -> None:
    """After close every call raises EngineFailure, and closing again is fine."""
    with LLM(max_model_len=256, max_num_seqs=1) as model:
        pass
    model.close()
    with pytest.raises(EngineFailure, match="closed"):
        model.generate("Hi", GREEDY)
    with pytest.raises(EngineFailure, match="closed"):
        next(model.stream("Hi", GREEDY))


def test_an_abandoned_llm_ends_its_worker() -> None:
    """When the last reference goes, so does the worker."""
    model = LLM(max_model_len=256, max_num_seqs=1)
    worker = psutil.Process(model._engine.client.worker_pid)
    del model
    gc.collect()
    worker.wait(5)


def test_structured_output(llm: LLM) -> None:
    """A grammar of one's own is kept to; one that does not compile is refused before the worker hears of it."""
    params = SamplingParams(max_tokens=20, grammar=grammar.regex(r"\d{3}-\d{2}", field="number"))
    assert re.fullmatch(r"\d{3}-\d{2}", llm.generate(["It is "], params)[0].outputs[0].text)
    broken = SamplingParams(grammar=grammar.regex("(", field="number"))
    with pytest.raises(InvalidRequest, match=r"number cannot be used: .*unclosed group"):
        llm.generate(["It is "], broken)
