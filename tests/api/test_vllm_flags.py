"""Flags that operators know from vLLM: taken with its meaning, said to change nothing, or refused with the reason."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from surefoot import cli
from surefoot.api import settings, vllm_flags
from surefoot.config import EngineConfig, ServerConfig
from surefoot.errors import ConfigError

# Every flag of `vllm serve` that operators use, with a value that asks for what vLLM does by itself.
OPERATORS = shlex.split("""
--host=0.0.0.0 --port=8000 --served-model-name=glm --api-key=k --tokenizer-mode=auto --trust-remote-code
--download-dir=x --load-format=auto --dtype=auto --kv-cache-dtype=auto --max-model-len=4K
--gpu-memory-utilization=0.92 --cpu-offload-gb=0 --block-size=16 --enable-prefix-caching --enable-chunked-prefill
--max-num-batched-tokens=8192 --max-num-seqs=256 --scheduling-policy=fcfs --max-num-queued-reqs=100
--max-num-queued-tokens=10000 --enforce-eager -O2 --tensor-parallel-size=1 -tp=1 --pipeline-parallel-size=1 -pp=1
--data-parallel-size=1 -dp=1 --distributed-executor-backend=mp --seed=0 --max-logprobs=20 --generation-config=auto
--override-generation-config={} --hf-overrides={} --chat-template-content-format=auto
--default-chat-template-kwargs={} --response-role=assistant --enable-auto-tool-choice --max-loras=1
--max-lora-rank=16 --shutdown-timeout=0 --disable-log-stats --no-enable-log-requests --max-log-len=10
--uvicorn-log-level=info --disable-uvicorn-access-log --disable-access-log-for-endpoints=/health
--enable-prompt-tokens-details --h11-max-header-count=256 --h11-max-incomplete-event-size=4194304
""")


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`serve("./model", …)` → both configurations and the notes, by way of the command line."""

    def run(*arguments: str) -> tuple[EngineConfig, ServerConfig, list[str]]:
        seen: list[Any] = []
        monkeypatch.setattr("surefoot.api.serve.serve", lambda *given: seen.extend(given) or 0)
        with pytest.raises(SystemExit) as exit:
            cli.main(["serve", *arguments])
        assert exit.value.code == 0, exit.value.code
        engine, server, notes = seen
        return engine, server, notes

    return run


@pytest.mark.parametrize("flag", OPERATORS)
def test_a_flag_with_what_vllm_does_by_itself_is_taken(serve: Any, flag: str) -> None:
    """None of the flags that operators pass is unknown, and none is refused at vLLM's default."""
    engine, _, _ = serve("./model", flag)
    assert engine.model == "./model"


def test_all_of_them_at_once(serve: Any) -> None:
    """A whole command line of vLLM's arrives: with its meaning where there is one, with a note where there is none."""
    engine, server, notes = serve("./model", *OPERATORS)
    assert (engine.max_model_len, engine.max_num_seqs, engine.gpu_memory_utilization) == (4096, 256, 0.92)
    assert (server.host, server.served_model_name, server.api_key) == ("0.0.0.0", ("glm",), ("k",))
    assert (server.max_queued_requests, server.max_queued_tokens, server.drain_timeout) == (100, 10_000, 0.0)
    assert any(note.startswith("--enforce-eager changes nothing here") for note in notes)


def test_values_may_stand_apart(serve: Any) -> None:
    """A value after a space, either spelling of the name, and several values of one flag are read as vLLM does."""
    engine, server, _ = serve(
        "./model", "--served-model-name", "a", "b", "-tp", "1", "--swap_space", "4", "-O", "3", "--api-key", "k", "l"
    )
    assert (engine.model, server.served_model_name, server.api_key) == ("./model", ("a", "b"), ("k", "l"))
    assert serve("--tensor-parallel-size", "1", "./model")[0].model == "./model"
    assert serve("--model", "./model", "--enforce-eager")[0].model == "./model"


def test_values_in_vllms_words(serve: Any) -> None:
    """half, auto, vllm and such are the values that we call otherwise."""
    engine, server, _ = serve("--dtype=half", "--max-model-len=auto", "--generation-config=vllm", "--load-format=hf")
    assert (engine.dtype, engine.max_model_len, engine.load_format) == ("float16", None, "auto")
    assert server.generation_config == "none"


@pytest.mark.parametrize(
    "flag",
    [
        "--pipeline-parallel-size=2", "-tp=x", "--lora-modules=a=b", "--enable-lora", "--kv-cache-dtype=fp8_e5m2",
        "--cpu-offload-gb=4", "--revision=abc", "--tokenizer=other", "--speculative-config={\"model\": \"x\"}",
        "--enable-log-outputs", "--otlp-traces-endpoint=http://x", "--middleware=a.b", "--root-path=/x",
        "--enable-request-id-headers", "--log-config-file=x", "--hf-overrides={\"a\": 1}",
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_with_the_reason(
    serve: Any, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server does not start, says which flag it was and why, and exits with 2."""
    with pytest.raises(SystemExit) as exit:
        cli.main(["serve", "./model", flag])
    assert exit.value.code == 2
    message = capsys.readouterr().err
    assert "cannot be honoured here: " in message
    assert vllm_flags.SHORT.get(flag.split("=")[0], flag.split("=")[0][2:]).replace("_", "-") in message


def test_a_missing_value_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """A flag at the end, or before another one, whose value is missing is named."""
    for arguments in (["--swap-space"], ["--swap-space", "--port=1"]):
        with pytest.raises(SystemExit) as exit:
            cli.main(["serve", *arguments])
        assert exit.value.code == 2
        assert "--swap-space: a value is missing" in capsys.readouterr().err


def test_an_unknown_flag_is_still_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    """What neither of us knows is no flag."""
    with pytest.raises(SystemExit) as exit:
        cli.main(["serve", "--no-such-flag"])
    assert exit.value.code == 2
    assert "--no-such-flag" in capsys.readouterr().err


def test_a_yaml_file_of_vllms(tmp_path: Path) -> None:
    """Its keys are judged like flags, with the place that they stand in."""
    path = tmp_path / "serve.yaml"
    path.write_text("model: ./model\ntensor-parallel-size: 1\nenforce-eager: true\nmax-num-queued-reqs: 7\n")
    notes: list[str] = []
    engine, server = settings.resolve({"config": str(path)}, {}, notes.append)
    assert (engine.model, server.max_queued_requests, len(notes)) == ("./model", 7, 1)
    path.write_text("tensor-parallel-size: 8\n")
    with pytest.raises(ConfigError, match=r"serve.yaml: tensor-parallel-size: 8 cannot be honoured"):
        settings.resolve({"config": str(path)}, {})


def test_vllms_key_guards_the_server() -> None:
    """VLLM_API_KEY is a key, unless ours or a flag gives another."""
    assert settings.resolve({}, {"VLLM_API_KEY": "theirs"})[1].api_key == ("theirs",)
    assert settings.resolve({"api_key": ["flag"]}, {"VLLM_API_KEY": "theirs"})[1].api_key == ("flag",)
    assert settings.resolve({}, {"VLLM_API_KEY": "theirs", "SUREFOOT_API_KEY": "ours"})[1].api_key == ("ours",)


def test_the_table_is_well_made() -> None:
    """Every entry takes its own default without a word, and gives a reason that ends a sentence."""
    for name, entry in vllm_flags.TABLE.items():
        assert vllm_flags.judge(name, entry.default, name) is None
        assert entry.why
        assert not entry.why.endswith(".")
