"""The engine without a server: `LLM` runs prompts from any script, over the same bridge as the server does.

    from surefoot import LLM, SamplingParams

    with LLM("smollm2") as llm:
        for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
            print(output.outputs[0].text)

The worker is a process of its own that imports nothing of the script, so no `if __name__ == "__main__"` is needed.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import Any, Self

import msgspec
from rich.console import Console
from rich.progress import Progress, TaskID

from surefoot import checkpoint
from surefoot.api import settings
from surefoot.api.local import CompletionOutput, Job, LocalEngine, Message, Prompt, Writer, is_list
from surefoot.errors import InvalidRequest, RequestError
from surefoot.types import SamplingParams


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
        self._engine = LocalEngine(config, progress=progress)
        self.tokenizer = self._engine.tokenizer
        self.default_sampling_params = SamplingParams(**self._engine.generation_defaults.given())
        """Used where a call gives none: what the model's generation_config.json recommends."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the worker. Done by itself when the object or the interpreter goes; twice is fine."""
        self._engine.close()

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together."""
        return self._engine.max_model_len

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
        jobs = [self._engine.job(prompt, each) for prompt, each in zip(listed, params, strict=True)]
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
        jobs = [self._engine.chat_job(chat, each) for chat, each in zip(chats, params, strict=True)]
        return self._run(jobs, use_progress=use_progress)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """The text of one completion (n=1) as it comes. Raises RequestError; closing the iterator cancels."""
        return self._stream(self._engine.job(prompt, sampling_params or self.default_sampling_params))

    def stream_chat(self, messages: Sequence[Message], sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """The text of one answer (n=1) as it comes. Raises RequestError; closing the iterator cancels."""
        return self._stream(self._engine.chat_job(messages, sampling_params or self.default_sampling_params))

    # ---- running ----------------------------------------------------------------------------------------------------

    def _run(self, jobs: Sequence[Job], *, use_progress: bool) -> list[RequestOutput]:
        console = Console(stderr=True)
        bar = Progress(console=console, transient=True) if use_progress and console.is_terminal else None
        with bar or nullcontext():
            task = bar.add_task("generating", total=len(jobs)) if bar else None
            return self._engine.loop.run(self._run_all(jobs, bar, task))

    async def _run_all(self, jobs: Sequence[Job], bar: Progress | None, task: TaskID | None) -> list[RequestOutput]:
        # Twice what runs at once: enough to have the next prompt ready, little enough to hold.
        room = asyncio.Semaphore(2 * self._engine.client.info.limits.max_num_seqs)

        async def one(job: Job) -> RequestOutput:
            async with room:
                output = await self._complete(job)
            if bar is not None and task is not None:
                bar.advance(task)
            return output

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(job)) for job in jobs]
        return [task.result() for task in tasks]

    async def _complete(self, job: Job) -> RequestOutput:
        writers = [Writer(index, job, self.tokenizer) for index in range(job.params.n)]
        result = RequestOutput(prompt=job.text, prompt_token_ids=job.ids)
        try:
            async with self._engine.client.submit(job.ids, job.params) as handle:
                async for events in handle:
                    for event in events:
                        writers[event.child].take(event, handle)
        except RequestError as error:
            result.error = error
            return result
        result.outputs = [writer.output for writer in writers]
        return result

    async def _pieces(self, job: Job) -> AsyncIterator[str]:
        writer = Writer(0, job, self.tokenizer)
        async with self._engine.client.submit(job.ids, job.params) as handle:
            async for events in handle:
                for event in events:
                    if text := writer.take(event, handle):
                        yield text

    def _stream(self, job: Job) -> Iterator[str]:
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

        future = self._engine.loop.start(pump())
        try:
            while (piece := pieces.get()) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            future.cancel()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list is several prompts unless it begins with a token id; all else is one prompt, good or bad."""
    if not is_list(prompts) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _is_chat(messages: Any) -> bool:
    """Whether this is one conversation, good or bad, rather than a list of them."""
    return not is_list(messages) or bool(messages and not is_list(messages[0]))


def _per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, default: SamplingParams, count: int
) -> list[SamplingParams]:
    if params is None or not is_list(params):  # what is no SamplingParams is refused where it meets its prompt
        return [default if params is None else params] * count  # type: ignore[list-item]
    assert not isinstance(params, SamplingParams)
    if len(params) != count:
        raise InvalidRequest(
            f"{len(params)} sampling parameters were given for {count} prompts.", param="sampling_params"
        )
    return list(params)
