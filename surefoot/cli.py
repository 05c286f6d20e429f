"""The command line. Everything heavy is imported by the command that needs it, so that `--help` is instant."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from surefoot.errors import StartupError, SurefootError

Text = str | None
Texts = list[str] | None
Whole = int | None
Real = float | None

MODEL, MEMORY, SERVER, SAMPLING, OTHER = "Model", "Memory and batching", "Server", "Sampling", "Other"
LOAD = "Load"


def _option(panel: str, text: str, metavar: str | None = None) -> Any:
    return typer.Option(help=text, metavar=metavar, rich_help_panel=panel, show_default=False)


ModelName = Annotated[
    Text,
    typer.Argument(
        help="smollm2 (the embedded model, default), a directory with config.json and *.safetensors, or a *.gguf file.",
        show_default=False,
    ),
]
Dtype = Annotated[Text, _option(MODEL, "auto (what this device is fast at), float32, bfloat16 or float16.", "TYPE")]
Device = Annotated[Text, _option(MODEL, "auto, cpu or cuda.", "DEVICE")]
Quantization = Annotated[
    Text, _option(MODEL, "none, int8 or fp8 (GPUs only): hold weights in 8 bits per channel.", "KIND")
]
ModelImpl = Annotated[
    Text, _option(MODEL, "surefoot, transformers (any causal model of it), or auto: ours where there is one.", "WHOSE")
]
LoadFormat = Annotated[Text, _option(MODEL, "auto, or dummy: random weights, for trying sizes out.", "FORMAT")]
Seed = Annotated[Text, _option(MODEL, "Seed of what is random at start; requests bring their own (default: 0).", "N")]
MaxModelLen = Annotated[
    Text, _option(MEMORY, "Tokens of prompt and answer together, such as 4096 or 32K (default: what fits).", "TOKENS")
]
MaxNumBatchedTokens = Annotated[
    Text, _option(MEMORY, "Tokens that one step computes at most (default: 512 on CPU, 2048 on GPU).", "TOKENS")
]
MaxNumSeqs = Annotated[
    Text, _option(MEMORY, "Sequences that run at once (default: 16 on CPU, 256 on GPU); more wait.", "N")
]
BlockSize = Annotated[Text, _option(MEMORY, "Tokens of a KV cache block (default: 16 on CPU, 128 on GPU).", "TOKENS")]
Memory = Annotated[
    Text,
    _option(
        MEMORY,
        "For weights, activations and KV cache together, such as 2GiB (default: free less 1GiB, 4GiB at most on CPU).",
        "SIZE",
    ),
]
GpuMemoryUtilization = Annotated[
    Text, _option(MEMORY, "The same as a fraction of the GPU's memory, such as 0.4; --memory is preferred.", "FRACTION")
]
MaxStepMs = Annotated[
    Text,
    _option(MEMORY, "Milliseconds of a step on a GPU while others wait for a token (default: 100).", "MS"),
]
IdleRelease = Annotated[
    Text,
    _option(
        MEMORY, "Seconds without requests until the KV cache's memory is given back, for a while (default: never).",
        "SECONDS",
    ),
]  # fmt: skip
PrefixCaching = Annotated[
    bool | None,
    typer.Option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Keep computed prompts and share them between requests that begin alike (default: on).",
        rich_help_panel=MEMORY,
        show_default=False,
    ),
]
LogLevel = Annotated[Text, _option(OTHER, "debug, info, warning, error or critical (default: info).", "LEVEL")]
Config = Annotated[Text, _option(OTHER, "YAML file with any of these settings, one `name: value` a line.", "FILE")]

Url = Annotated[Text, _option(SERVER, "Ask this server, such as http://127.0.0.1:8000/v1, and load nothing.", "URL")]
Key = Annotated[Text, _option(SERVER, "API key for --url.", "KEY")]
Temperature = Annotated[Real, _option(SAMPLING, "0 is greedy; 1 is the model's own distribution.", "T")]
TopP = Annotated[Real, _option(SAMPLING, "Keep the likeliest tokens up to this probability in sum.", "P")]
SampleSeed = Annotated[Whole, _option(SAMPLING, "The same seed gives the same text.", "N")]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="An LLM inference engine and OpenAI-compatible server where a request that fails, fails alone.\n\n"
    "Start with `surefoot serve`, then `surefoot chat --url http://127.0.0.1:8000/v1`.",
)


@app.command()
def serve(
    context: typer.Context,
    model: ModelName = None,
    host: Annotated[Text, _option(SERVER, "Address to listen on (default: 127.0.0.1).", "ADDRESS")] = None,
    port: Annotated[Text, _option(SERVER, "Port to listen on; 0 is any free one (default: 8000).", "PORT")] = None,
    served_model_name: Annotated[
        Texts, _option(SERVER, "Name of the model in the API; give it again for further names.", "NAME")
    ] = None,
    api_key: Annotated[
        Texts,
        _option(SERVER, "Key that clients must send; repeatable. SUREFOOT_API_KEY keeps it out of `ps`.", "KEY"),
    ] = None,
    admin_api_key: Annotated[
        Texts, _option(SERVER, "Key that opens /drain and /memory, and all else; without one they are closed.", "KEY")
    ] = None,
    generation_config: Annotated[
        Text,
        _option(SERVER, "auto: sample as the model's generation_config.json says; none: ignore it.", "SOURCE"),
    ] = None,
    chat_template: Annotated[
        Text,
        _option(
            SERVER, "Jinja template of chats, a file or the text itself (default: the checkpoint's own).", "TEMPLATE"
        ),
    ] = None,
    tool_call_parser: Annotated[
        Text, _option(SERVER, "How it calls tools: glm4, mistral, hermes, llama3_json, none (default: auto).", "NAME")
    ] = None,
    reasoning_parser: Annotated[
        Text, _option(SERVER, "How its thoughts are told from its answers: think, none (default: auto).", "NAME")
    ] = None,
    drain_timeout: Annotated[
        Text, _option(SERVER, "Seconds that SIGTERM lets running requests finish (default: 30).", "SECONDS")
    ] = None,
    max_queued_requests: Annotated[
        Text, _option(SERVER, "Requests that may wait (default: 1024); further ones get a 503.", "N")
    ] = None,
    max_queued_tokens: Annotated[
        Text, _option(SERVER, "Prompt tokens that may wait (default: 1,048,576).", "TOKENS")
    ] = None,
    max_body_bytes: Annotated[Text, _option(SERVER, "Largest request body (default: 16MiB).", "SIZE")] = None,
    request_timeout: Annotated[
        Text, _option(SERVER, "Seconds of a request to its end, then it gets a 408 (default: no limit).", "SECONDS")
    ] = None,
    first_token_timeout: Annotated[
        Text, _option(SERVER, "Seconds of a request to its first token (default: no limit).", "SECONDS")
    ] = None,
    max_restarts: Annotated[
        Text, _option(SERVER, "Workers that are replaced before the server gives up (default: 20).", "N")
    ] = None,
    restart_window: Annotated[
        Text, _option(SERVER, "Seconds within which these deaths count (default: 300).", "SECONDS")
    ] = None,
    incident_dir: Annotated[
        Text, _option(SERVER, "Write a record of each worker's death here: what ran, no texts (default: none).", "DIR")
    ] = None,
    while_restarting: Annotated[
        Text, _option(SERVER, "New requests, while a worker is replaced: wait (default) or refuse (503).", "WHAT")
    ] = None,
    sleep_after: Annotated[
        Text,
        _option(
            SERVER, "Seconds without requests until all memory is given back, weights too (default: never).", "SECONDS"
        ),
    ] = None,
    while_sleeping: Annotated[
        Text, _option(SERVER, "New requests, while the server sleeps: wake it (default) or refuse (503).", "WHAT")
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    quantization: Quantization = None,
    model_impl: ModelImpl = None,
    load_format: LoadFormat = None,
    trust_remote_code: Annotated[
        bool | None,
        typer.Option(
            "--trust-remote-code",
            help="Accepted and unneeded: no code of a checkpoint is run.",
            rich_help_panel=MODEL,
            show_default=False,
        ),
    ] = None,
    seed: Seed = None,
    max_model_len: MaxModelLen = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    max_num_seqs: MaxNumSeqs = None,
    block_size: BlockSize = None,
    memory: Memory = None,
    gpu_memory_utilization: GpuMemoryUtilization = None,
    max_step_ms: MaxStepMs = None,
    idle_release: IdleRelease = None,
    enable_prefix_caching: PrefixCaching = None,
    allow_fault_injection: Annotated[
        bool | None,
        typer.Option(
            "--allow-fault-injection",
            help="Obey SUREFOOT_FAULTS, such as `execute:oom:p=0.05`; for tests only.",
            rich_help_panel=OTHER,
            show_default=False,
        ),
    ] = None,
    log_level: LogLevel = None,
    config: Config = None,
) -> None:
    """Serve a model on an OpenAI-compatible endpoint.

    **Examples**

    - `surefoot serve` — the embedded model on http://127.0.0.1:8000/v1
    - `surefoot serve ./model --port 9000 --memory 8GiB --max-model-len 32K`
    - `surefoot serve --config serve.yaml` — settings from a file

    Every setting is also a variable (`SUREFOOT_PORT` for `--port`) and a key of the YAML file; a flag beats a
    variable, which beats the file. `-` and `_` are the same; flags of vLLM's are taken too, or refused with the
    reason. SIGTERM and Ctrl-C let running requests finish; a second
    one stops now.
    """
    from surefoot.api import settings

    notes: list[str] = []
    engine, server = settings.resolve({**(context.obj or {}), **context.params}, os.environ, notes.append)
    from surefoot.api.serve import serve as run  # after that, since it takes a second

    raise typer.Exit(run(engine, server, notes))


@app.command()
def chat(
    context: typer.Context,
    model: ModelName = None,
    url: Url = None,
    api_key: Key = None,
    system: Annotated[Text, _option(SAMPLING, "System message: who the model is to be.", "TEXT")] = None,
    max_tokens: Annotated[Whole, _option(SAMPLING, "Longest answer (default: to the end of the context).", "N")] = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    sample_seed: SampleSeed = None,
    dtype: Dtype = None,
    device: Device = None,
    quantization: Quantization = None,
    memory: Memory = None,
    max_model_len: MaxModelLen = None,
) -> None:
    """Talk to a model in the terminal.

    - `surefoot chat` — load the embedded model here
    - `surefoot chat --url http://127.0.0.1:8000/v1` — talk to a server

    Ctrl-C stops an answer; Ctrl-D, or `/exit`, ends. `/clear` forgets what was said.
    """
    from surefoot.api import terminal

    raise typer.Exit(terminal.chat(context.params))


@app.command()
def generate(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input.")],
    model: Annotated[Text, _option(MODEL, "As for `serve` (default: smollm2).", "MODEL")] = None,
    url: Url = None,
    api_key: Key = None,
    max_tokens: Annotated[Whole, _option(SAMPLING, "Longest continuation (default: 128).", "N")] = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    sample_seed: SampleSeed = None,
    dtype: Dtype = None,
    device: Device = None,
    quantization: Quantization = None,
    memory: Memory = None,
    max_model_len: MaxModelLen = None,
) -> None:
    """Continue a text and print what comes, as it comes.

    - `surefoot generate "The capital of France is" --max-tokens 8 --temperature 0`
    - `surefoot generate - < prompt.txt`
    """
    from surefoot.api import terminal

    raise typer.Exit(terminal.generate(prompt, context.params))


bench = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", help="Measure a server.")
app.add_typer(bench, name="bench")


@bench.command("serve")
def bench_serve(
    url: Annotated[str, _option(SERVER, "Where `/completions` is (default: a server here).", "URL")] = (
        "http://127.0.0.1:8000/v1"
    ),
    model: Annotated[Text, _option(SERVER, "Name of the model there (default: the first it lists).", "NAME")] = None,
    api_key: Key = None,
    chat: Annotated[bool, _option(LOAD, "Ask /chat/completions, for servers that have nothing else.")] = False,
    input_len: Annotated[int, _option(LOAD, "Tokens of a prompt, about (default: 128).", "TOKENS")] = 128,
    output_len: Annotated[int, _option(LOAD, "Tokens of an answer (default: 128).", "TOKENS")] = 128,
    prefix_len: Annotated[int, _option(LOAD, "Tokens that all prompts begin with (default: 0).", "TOKENS")] = 0,
    token_ids: Annotated[
        Whole, _option(LOAD, "Send random token ids, of a vocabulary of this size, not words.", "VOCABULARY")
    ] = None,
    requests: Annotated[int, _option(LOAD, "Requests of a run (default: 8).", "N")] = 8,
    concurrency: Annotated[Whole, _option(LOAD, "Streams at once (default: all).", "N")] = None,
    rate: Annotated[Real, _option(LOAD, "Requests per second, at random moments (default: all at once).", "R")] = None,
    trace: Annotated[
        Text, _option(LOAD, "JSONL of timestamp (ms), input_length or prompt, and output_length.", "FILE")
    ] = None,
    goodput: Annotated[
        Text, _option(LOAD, "Count requests within limits in ms, such as 'ttft:500 tpot:50 e2el:10000'.", "LIMITS")
    ] = None,
    seed: Annotated[
        Whole, _option(LOAD, "The same seed gives the same prompts and moments (default: another each time).", "N")
    ] = None,
    repeats: Annotated[int, _option(LOAD, "Runs, of which the median is shown (default: 1).", "N")] = 1,
    save: Annotated[
        Text, _option(OTHER, "Write everything to this JSON file: runs, machine, versions.", "FILE")
    ] = None,
) -> None:
    """Put a load on any OpenAI-compatible server and time the answers as its clients see them.

    - `surefoot bench serve --requests 32 --concurrency 8`
    - `surefoot bench serve --url http://127.0.0.1:8001/v1 --rate 4 --goodput "ttft:500 tpot:50" --save result.json`
    - `surefoot bench serve --trace trace.jsonl`
    """
    from surefoot.api import benchmark

    key = api_key or os.environ.get("SUREFOOT_API_KEY")
    load = benchmark.Load(
        url=url, model=model or benchmark.first_model(url, key), chat=chat, input_len=input_len, output_len=output_len,
        prefix_len=prefix_len, vocabulary=token_ids, requests=requests, concurrency=concurrency, rate=rate,
        trace=trace, goodput=goodput, seed=secrets.randbits(32) if seed is None else seed,
    )  # fmt: skip
    result = benchmark.measure(load, repeats=repeats, api_key=key)
    typer.echo(benchmark.report(result))
    if save is not None:
        benchmark.save(result, save)
    raise typer.Exit(0 if result["median"]["served"] else 1)


@app.command()
def plan(
    model: ModelName = None,
    gpu: Annotated[Text, _option(MEMORY, "A card of this size, such as 80GiB, which need not be here.", "SIZE")] = None,
    card: Annotated[
        Text, typer.Option("--device", help="The card here with this number.", metavar="N", rich_help_panel=MEMORY)
    ] = None,
    neighbours: Annotated[
        Text, _option(MEMORY, "What others hold of it (default: nothing; of a card here, what is used).", "SIZE")
    ] = None,
    memory: Memory = None,
    gpu_memory_utilization: GpuMemoryUtilization = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    block_size: BlockSize = None,
    dtype: Dtype = None,
    quantization: Quantization = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON, in bytes.", rich_help_panel=OTHER)] = False,
) -> None:
    """Show what a model takes before anything is loaded: it needs config.json, and no GPU. The status is 1 if it does
    not fit.

    - `surefoot plan GLM-4-9B --gpu 80GiB --neighbours 38GiB --max-model-len 128k`
    - `surefoot plan --memory 2GiB`
    """
    from rich.console import Console

    from surefoot.api import forecast

    found = forecast.forecast(
        {
            "model": model, "gpu": gpu, "card": card, "neighbours": neighbours, "memory": memory, "dtype": dtype,
            "gpu_memory_utilization": gpu_memory_utilization, "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens,
            "block_size": block_size, "quantization": quantization,
        }
    )  # fmt: skip
    if as_json:
        typer.echo(forecast.as_json(found))
    else:
        forecast.show(found, Console(highlight=False))
    raise typer.Exit(0 if found.fits else 1)


@app.command()
def memory(
    limit: Annotated[Text, _option(MEMORY, "Hold the server to this much from now on, such as 24GiB.", "SIZE")] = None,
    url: Annotated[str, _option(SERVER, "Where the server is (default: here).", "URL")] = "http://127.0.0.1:8000",
    admin_api_key: Annotated[
        Text, _option(SERVER, "Its admin key; SUREFOOT_ADMIN_API_KEY keeps it out of `ps`.", "KEY")
    ] = None,
) -> None:
    """Show what a running server's memory goes to, or give it a new limit while it serves; no request fails for that.

    - `surefoot memory`
    - `surefoot memory --limit 24GiB`
    """
    from surefoot.api import terminal

    key = admin_api_key or os.environ.get("SUREFOOT_ADMIN_API_KEY")
    raise typer.Exit(terminal.memory(url, limit, key))


@app.command()
def version() -> None:
    """Print the version."""
    from surefoot import __version__

    typer.echo(__version__)


def normalise(arguments: Sequence[str]) -> list[str]:
    """`--max_model_len=4k` → `--max-model-len=4k`; nothing after a bare `--` is touched."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return [*map(_dashed, arguments[:end]), *arguments[end:]]


def _dashed(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if argument.startswith("--") else argument


def _without_foreign(arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Take out the flags that only vLLM has: they are no parameters of the command, and are judged with the rest."""
    from surefoot.api import settings, vllm_flags

    return vllm_flags.split(arguments, {name: setting.many for name, setting in settings.SETTINGS.items()})


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `surefoot` command; exits with the status that the error tree names."""
    try:
        given = normalise(sys.argv[1:] if arguments is None else arguments)
        foreign: dict[str, Any] = {}
        if given[:1] == ["serve"]:
            given, foreign = _without_foreign(given)
        app(given, prog_name="surefoot", obj=foreign)
    except SurefootError as error:
        typer.secho(f"surefoot: {error.message}", fg="red", err=True)
        sys.exit(error.exit_code if isinstance(error, StartupError) else 1)
