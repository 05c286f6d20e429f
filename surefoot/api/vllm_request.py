"""One request of a program written for vLLM: its prompt in any shape, and its outputs as they grow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import msgspec

from surefoot.api.local import CompletionOutput as Written
from surefoot.api.local import Job, LocalEngine, Writer
from surefoot.api.vllm_outputs import CompletionOutput, RequestMetrics, RequestOutput, completion, rest_of
from surefoot.api.vllm_params import BadRequest, RequestOutputKind, SamplingParams
from surefoot.errors import EngineFailure, RequestError
from surefoot.sampling import shown

Prompt = str | Sequence[int] | Mapping[str, Any]


def prepare(engine: LocalEngine, prompt: Any, params: SamplingParams, options: Mapping[str, Any]) -> Job:
    """A prompt in any of vLLM's shapes, tokenized and fitted. Raises InvalidRequest."""
    if not isinstance(params, SamplingParams):
        raise BadRequest(f"sampling_params must be SamplingParams, got {shown(params)}.", param="sampling_params")
    text, ids = _text_and_ids(prompt)
    native = params.native()
    if ids is None:
        assert text is not None
        ids = engine.tokenizer.encode(text, add_special_tokens=options.get("add_special_tokens", True))
    last = params.truncate_prompt_tokens
    if last is not None:
        if isinstance(last, bool) or not isinstance(last, int) or last < 1:
            raise BadRequest(f"truncate_prompt_tokens={shown(last)}: 1 at least.", param="truncate_prompt_tokens")
        ids = ids[-last:]
    if not params.detokenize and native.stop:
        raise BadRequest("stop strings need detokenize=True.", param="stop")
    return msgspec.structs.replace(engine.job(ids, native), text=text)


def _text_and_ids(prompt: Any) -> tuple[str | None, list[int] | None]:
    """`str | ids | {"prompt"} | {"prompt_token_ids"} | both`; ids go before text."""
    if isinstance(prompt, Mapping):
        if prompt.get("multi_modal_data"):
            raise BadRequest("multi_modal_data: models here read text alone.", param="multi_modal_data")
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    else:
        text, ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
    if (text is None or isinstance(text, str)) and isinstance(ids, list | tuple):
        return text, list(ids)
    if isinstance(text, str) and ids is None:
        return text, None
    raise BadRequest(
        f"prompt must be a text, token ids, or a mapping with prompt or prompt_token_ids, got {shown(prompt)}.",
        param="prompt",
    )


def writers_of(engine: LocalEngine, job: Job) -> list[Writer]:
    """One for each completion."""
    return [Writer(index, job, engine.tokenizer) for index in range(job.params.n)]


def request_output(
    name: str, job: Job, outputs: list[CompletionOutput], metrics: RequestMetrics, error: RequestError | None = None
) -> RequestOutput:
    """As vLLM has it; with all of `outputs` finished it is the last one."""
    finished = all(output.finished() for output in outputs)
    if finished:
        metrics.finished_time = time.time()
    return RequestOutput(
        request_id=name, prompt=job.text, prompt_token_ids=job.ids, outputs=outputs, finished=finished,
        metrics=metrics, num_cached_tokens=metrics.num_cached_tokens, error=error,
    )  # fmt: skip


class Stream:
    """What a request on the engine's loop has come to, for its reader on another loop. Only the latest is kept, so
    that a slow reader gets larger steps and not a longer queue."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.metrics = RequestMetrics(arrival_time=time.time())
        self.aborted = False
        self.outputs: list[Written] = []
        self._loop, self._news = loop, asyncio.Event()
        self._error: RequestError | None = None
        self._pump: Future[None] | None = None

    def start(self, engine: LocalEngine, job: Job, *, priority: int) -> None:
        self.outputs = [writer.output for writer in writers_of(engine, job)]
        self._pump = engine.loop.start(self._run(engine, job, priority))

    async def _run(self, engine: LocalEngine, job: Job, priority: int) -> None:
        """On the engine's loop: a snapshot after each step."""
        writers = writers_of(engine, job)
        try:
            async with engine.client.submit(job.ids, job.params, priority=priority) as handle:
                async for events in handle:
                    for event in events:
                        writers[event.child].take(event, handle)
                        self.metrics.grew(event.cached)
                    self.outputs = [_copied(writer.output) for writer in writers]
                    self._tell()
        except RequestError as error:
            self._error = error
        except Exception as error:  # a bug must end the reader's wait, not hide in a thread
            self._error = EngineFailure(f"{type(error).__name__}: {error}")
        self._tell()

    def _tell(self) -> None:
        with suppress(RuntimeError):  # the reader's loop is closed: nobody reads any more
            self._loop.call_soon_threadsafe(self._news.set)

    async def news(self) -> list[Written]:
        """The latest outputs, once there are any not seen before. Raises RequestError where the request failed."""
        await self._news.wait()
        self._news.clear()
        if self._error is not None and not self.aborted:
            raise self._error
        return self.outputs

    def abort(self) -> None:
        self.aborted = True
        self._news.set()

    def close(self) -> None:
        """Drop what still runs."""
        if self._pump is not None:
            self._pump.cancel()


def _copied(output: Written) -> Written:
    scores = None if output.logprobs is None else list(output.logprobs)
    return msgspec.structs.replace(output, token_ids=list(output.token_ids), logprobs=scores)


async def outputs_of(
    stream: Stream, name: str, job: Job, params: SamplingParams
) -> AsyncGenerator[RequestOutput, None]:
    """The outputs of a request in the kind that its parameters ask for."""
    before: list[CompletionOutput] = []
    finished = False
    while not finished:
        latest = [completion(output, shown=params.detokenize) for output in await stream.news()]
        if stream.aborted:
            latest = [
                each if each.finished() else msgspec.structs.replace(each, finish_reason="abort") for each in latest
            ]
        finished = all(output.finished() for output in latest)
        if params.output_kind is RequestOutputKind.DELTA:
            shown_now = [rest_of(each, before[at]) if before else each for at, each in enumerate(latest)]
        elif finished or params.output_kind is RequestOutputKind.CUMULATIVE:
            shown_now = latest
        else:
            continue
        before = latest
        yield request_output(name, job, shown_now, stream.metrics)
