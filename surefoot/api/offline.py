"""The engine without a server: `LLM` runs prompts from any script, over the same bridge as the server does.

    from surefoot import LLM, SamplingParams

    with LLM("smollm2") as llm:
        for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
            print(output.outputs[0].text)

The worker is a process of its own that imports nothing of the script, so no `if __name__ == "__main__"` is needed.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
from rich.console import Console
from rich.progress import Progress, TaskID

from surefoot import checkpoint
from surefoot.api import settings
from surefoot.api.detok import Detokenizer
from surefoot.api.tokenizer import Tokenizer, load_tokenizer
from surefoot.bridge.client import EngineClient, Policy
from surefoot.bridge.handle import RequestHandle
from surefoot.errors import EngineFailure, InvalidRequest, RequestError
from surefoot.sampling import check_token_ids, shown, validate
from surefoot.spec import read_generation_defaults
from surefoot.types import Emitted, Sampled, SamplingParams

T = TypeVar("T")
Prompt = str | Sequence[int]
Message = dict[str, str]


class Logprob(msgspec.Struct, frozen=True):
    """One candidate at one position; `rank` counts from 1 and is None beyond the candidates asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One of the n completions of a prompt. `logprobs` has an entry per token where SamplingParams.logprobs is set."""

    index: int
    text: str = ""
    token_ids: list[int] = []
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    """stop | length"""
    stop_reason: str | int | None = None
    """The stop string, or the id out of stop_token_ids, that ended it."""


class RequestOutput(msgspec.Struct, kw_only=True):
    """What became of one prompt. Where it failed while running, `error` says why and `outputs` is empty."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = []
    error: RequestError | None = None


class LLM:
    """A model in a worker process. `options` are those of `surefoot serve`, with underscores: `memory="2GiB"`.

    Raises StartupError where the model cannot be loaded. Use it in a `with` block or call `close`.
    """

    def __init__(
        self, model: str = checkpoint.EMBEDDED, *, progress: Callable[[str, float], None] | None = None, **options: Any
    ) -> None:
        config = settings.engine_config({"log_level": "warning", **options, "model": model})
        files = checkpoint.find(config.model, weights=config.load_format != "dummy")
        self.tokenizer: Tokenizer = load_tokenizer(files)
        self.default_sampling_params = SamplingParams(**read_generation_defaults(files).given())
        """Used where a call gives none: what the model's generation_config.json recommends."""
        self._loop = LoopThread()
        try:
            # Prompts wait here, not in the engine's queue, so that queue needs no bound of its own.
            self._client = self._loop.run(
                EngineClient.start(
                    config,
                    progress=progress,
                    policy=Policy(max_queued_requests=sys.maxsize, max_queued_tokens=sys.maxsize),
                )
            )
        except BaseException:
            self._loop.stop()
            raise
        self._finalizer = weakref.finalize(self, _close, self._loop, self._client)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the worker. Done by itself when the object or the interpreter goes; twice is fine."""
        self._finalizer()

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together."""
        return self._client.info.max_model_len

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_progress: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts, texts or lists of token ids, all at once; the outputs are in the order of the prompts.

        Raises InvalidRequest before anything runs where a prompt or its parameters are wrong. A prompt that fails
        while it runs fails alone: its output has `error` set.
        """
        listed = _as_list(prompts)
        params = _per_prompt(sampling_params, self.default_sampling_params, len(listed))
        jobs = [self._job(prompt, each) for prompt, each in zip(listed, params, strict=True)]
        return self._run(jobs, use_progress=use_progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list of them. Errors are those of `generate`."""
        chats: Sequence[Any] = [messages] if _is_chat(messages) else messages
        params = _per_prompt(sampling_params, self.default_sampling_params, len(chats))
        jobs = [self._chat_job(chat, each) for chat, each in zip(chats, params, strict=True)]
        return self._run(jobs, use_progress=use_progress)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """The text of one completion (n=1) as it comes. Raises RequestError; closing the iterator cancels."""
        return self._stream(self._job(prompt, sampling_params or self.default_sampling_params))

    def stream_chat(self, messages: Sequence[Message], sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """The text of one answer (n=1) as it comes. Raises RequestError; closing the iterator cancels."""
        return self._stream(self._chat_job(messages, sampling_params or self.default_sampling_params))

    # ---- preparing --------------------------------------------------------------------------------------------------

    def _job(self, prompt: Prompt, params: SamplingParams) -> _Job:
        if isinstance(prompt, str):
            return self._fit(prompt, self.tokenizer.encode(prompt), params)
        if not _is_list(prompt):
            raise InvalidRequest(f"A prompt is a text or a list of token ids, got {shown(prompt)}.", param="prompt")
        check_token_ids("prompt", prompt, self.tokenizer.token_count)
        return self._fit(None, list(prompt), params)

    def _chat_job(self, messages: Any, params: SamplingParams) -> _Job:
        if not _is_list(messages) or not all(isinstance(message, dict) for message in messages):
            raise InvalidRequest(
                f"A conversation is a list of {{'role': …, 'content': …}}, got {shown(messages)}.", param="messages"
            )
        text = self.tokenizer.render_chat(list(messages), add_generation_prompt=True)
        job = self._fit(text, self.tokenizer.encode(text, add_special_tokens=False), params)
        return msgspec.structs.replace(job, reply_prefix=self.tokenizer.reply_prefix)

    def _fit(self, text: str | None, ids: list[int], params: SamplingParams) -> _Job:
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(
                f"Sampling parameters are SamplingParams, got {shown(params)}.", param="sampling_params"
            )
        params = validate(params, token_count=self.tokenizer.token_count)
        room = self.max_model_len - len(ids)
        wanted = params.max_tokens if params.max_tokens is not None else max(room, 1)
        if not ids:
            raise InvalidRequest("The prompt is empty: there is nothing to complete.", param="prompt")
        if wanted > room:
            raise InvalidRequest(
                f"This model's maximum context length is {self.max_model_len} tokens. However, you requested {wanted} "
                f"output tokens and your prompt contains {len(ids)} input tokens. "
                "Shorten the prompt or lower max_tokens.",
                param="max_tokens" if room > 0 else "prompt",
            )
        return _Job(text, ids, msgspec.structs.replace(params, max_tokens=wanted))

    # ---- running ----------------------------------------------------------------------------------------------------

    def _run(self, jobs: Sequence[_Job], *, use_progress: bool) -> list[RequestOutput]:
        console = Console(stderr=True)
        bar = Progress(console=console, transient=True) if use_progress and console.is_terminal else None
        with bar or nullcontext():
            task = bar.add_task("generating", total=len(jobs)) if bar else None
            return self._loop.run(self._run_all(jobs, bar, task))

    async def _run_all(self, jobs: Sequence[_Job], bar: Progress | None, task: TaskID | None) -> list[RequestOutput]:
        # Twice what runs at once: enough to have the next prompt ready, little enough to hold.
        room = asyncio.Semaphore(2 * self._client.info.limits.max_num_seqs)

        async def one(job: _Job) -> RequestOutput:
            async with room:
                output = await self._complete(job)
            if bar is not None and task is not None:
                bar.advance(task)
            return output

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(job)) for job in jobs]
        return [task.result() for task in tasks]

    async def _complete(self, job: _Job) -> RequestOutput:
        writers = [_Writer(index, job, self.tokenizer) for index in range(job.params.n)]
        result = RequestOutput(prompt=job.text, prompt_token_ids=job.ids)
        try:
            async with self._client.submit(job.ids, job.params) as handle:
                async for events in handle:
                    for event in events:
                        writers[event.child].take(event, handle)
        except RequestError as error:
            result.error = error
            return result
        result.outputs = [writer.output for writer in writers]
        return result

    async def _pieces(self, job: _Job) -> AsyncIterator[str]:
        writer = _Writer(0, job, self.tokenizer)
        async with self._client.submit(job.ids, job.params) as handle:
            async for events in handle:
                for event in events:
                    if text := writer.take(event, handle):
                        yield text

    def _stream(self, job: _Job) -> Iterator[str]:
        if job.params.n != 1:
            raise InvalidRequest(f"A stream has one completion, got n={job.params.n}.", param="n")
        pieces: queue.SimpleQueue[str | BaseException | None] = queue.SimpleQueue()

        async def pump() -> None:
            try:
                async for text in self._pieces(job):
                    pieces.put(text)
                pieces.put(None)
            except BaseException as error:
                pieces.put(error)
                raise

        future = self._loop.start(pump())
        try:
            while (piece := pieces.get()) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            future.cancel()


class _Job(msgspec.Struct, frozen=True):
    """A prompt that fits, with its parameters complete."""

    text: str | None
    ids: list[int]
    params: SamplingParams
    reply_prefix: str = ""
    """What an answer starts with and does not contain."""


class _Writer:
    """One completion as it grows."""

    def __init__(self, index: int, job: _Job, tokenizer: Tokenizer) -> None:
        params = job.params
        self.output = CompletionOutput(index=index, logprobs=None if params.logprobs is None else [])
        self._params, self._tokenizer = params, tokenizer
        self._detok = Detokenizer(
            tokenizer,
            prefix=job.reply_prefix,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
        )

    def take(self, event: Emitted, handle: RequestHandle) -> str:
        """Add one token; returns the text that became final."""
        output, text = self.output, ""
        if output.finish_reason is not None:
            return text
        output.token_ids.append(event.sampled.token)
        self._score(event.sampled)
        if event.stop_token is None or self._params.include_stop_str_in_output:
            text = self._detok.push(event.sampled.token, check_stop=event.index >= self._params.min_tokens)
        if self._detok.stopped is None and event.finish is not None:
            text += self._detok.finish()
        if self._detok.stopped is not None:
            output.finish_reason, output.stop_reason = "stop", self._detok.stopped
            handle.cancel(event.child)
        elif event.finish is not None:
            output.finish_reason = event.finish
            output.stop_reason = event.stop_token if event.stop_token in self._params.stop_token_ids else None
        output.text += text
        return text

    def _score(self, sampled: Sampled) -> None:
        if self.output.logprobs is None or sampled.logprob is None:
            return
        ranked = {token: (logprob, rank) for rank, (token, logprob) in enumerate(sampled.top, 1)}
        ranked.setdefault(sampled.token, (sampled.logprob, None))  # type: ignore[arg-type]
        self.output.logprobs.append(
            {
                token: Logprob(logprob, rank, self._tokenizer.token_text(token))
                for token, (logprob, rank) in ranked.items()
            }
        )
        self.output.cumulative_logprob = (self.output.cumulative_logprob or 0.0) + sampled.logprob


class LoopThread:
    """An event loop in a thread of its own, for callers that have none.

    The worker is started on that thread, which lives as long as the worker is wanted (see `bridge.supervisor`).
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="surefoot", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `work` there. Raises EngineFailure where nothing runs any more."""
        if not self.here or self._loop.is_closed():
            work.close()
            raise EngineFailure(
                "This LLM is closed. Make another one."
                if self.here
                else "This LLM belongs to the process that made it, not to a fork. Make one here."
            )
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    @property
    def here(self) -> bool:
        """False in a forked child, which has a copy of the loop and not its thread."""
        return os.getpid() == self._pid

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` there and wait. Interrupting the wait cancels it. Raises EngineFailure as `start` does."""
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancel what still runs there and end the thread."""
        self.run(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _close(loop: LoopThread, client: EngineClient) -> None:
    if not loop.here:  # a fork leaves the worker to its parent
        return
    loop.run(client.stop("The LLM was closed before the request was done."))
    loop.stop()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list is several prompts unless it begins with a token id; all else is one prompt, good or bad."""
    if not _is_list(prompts) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _is_chat(messages: Any) -> bool:
    """Whether this is one conversation, good or bad, rather than a list of them."""
    return not _is_list(messages) or bool(messages and not _is_list(messages[0]))


def _is_list(value: object) -> bool:
    """Texts and bytes are sequences too, but never of prompts, ids or messages."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, default: SamplingParams, count: int
) -> list[SamplingParams]:
    if params is None or not _is_list(params):  # what is no SamplingParams is refused where it meets its prompt
        return [default if params is None else params] * count  # type: ignore[list-item]
    assert not isinstance(params, SamplingParams)
    if len(params) != count:
        raise InvalidRequest(
            f"{len(params)} sampling parameters were given for {count} prompts.", param="sampling_params"
        )
    return list(params)
