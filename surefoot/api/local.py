"""A model of one's own: a worker process and, for callers that have no event loop for it, one in a thread.

What `LLM` and the classes of `surefoot.vllm` share: starting, preparing prompts, and growing the text of completions.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeVar

import msgspec

from surefoot import checkpoint
from surefoot.api.detok import Detokenizer
from surefoot.api.tokenizer import Tokenizer, load_tokenizer
from surefoot.bridge.client import EngineClient
from surefoot.bridge.handle import RequestHandle
from surefoot.bridge.policy import Policy
from surefoot.config import EngineConfig
from surefoot.errors import EngineFailure, InvalidRequest
from surefoot.grammar import Compiler, GrammarError
from surefoot.sampling import check_token_ids, shown, validate
from surefoot.spec import read_generation_defaults
from surefoot.types import Emitted, Grammar, Sampled, SamplingParams

T = TypeVar("T")
Prompt = str | Sequence[int]
Message = dict[str, str]

UNBOUNDED: Final = Policy(max_queued_requests=sys.maxsize, max_queued_tokens=sys.maxsize)
"""For callers that hold their prompts themselves: the engine's queue needs no bound of its own then."""


FINE_GRAMMARS: Final = 256
"""How many grammars are remembered not to be compiled again."""


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


class Job(msgspec.Struct, frozen=True):
    """A prompt that fits, with its parameters complete."""

    text: str | None
    ids: list[int]
    params: SamplingParams
    reply_prefix: str = ""
    """What an answer starts with and does not contain."""


class Writer:
    """One completion as it grows."""

    def __init__(self, index: int, job: Job, tokenizer: Tokenizer) -> None:
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


class LocalEngine:
    """A model in a worker process, reached from any thread. Raises StartupError where it cannot be loaded."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        policy: Policy = UNBOUNDED,
        progress: Callable[[str, float], None] | None = None,
    ) -> None:
        files = checkpoint.find(config.model, weights=config.load_format != "dummy")
        self.tokenizer: Tokenizer = load_tokenizer(files)
        self.generation_defaults = read_generation_defaults(files)
        """What the model's generation_config.json recommends."""
        self.loop = LoopThread()
        try:
            self.client = self.loop.run(EngineClient.start(config, progress=progress, policy=policy))
        except BaseException:
            self.loop.stop()
            raise
        self.loop.run(self._learn())
        self._compiler: Compiler | None = None
        self._fine: set[Grammar] = set()  # that compiled
        self._finalizer = weakref.finalize(self, _close, self.loop, self.client)

    async def _learn(self) -> None:
        self.client.learn(self.tokenizer.vocabulary())

    def close(self) -> None:
        """End the worker. Done by itself when the object or the interpreter goes; twice is fine."""
        self._finalizer()

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together."""
        return self.client.info.max_model_len

    def job(self, prompt: Prompt, params: SamplingParams) -> Job:
        """A text or token ids with parameters, both checked. Raises InvalidRequest."""
        if isinstance(prompt, str):
            return self.fit(prompt, self.tokenizer.encode(prompt), params)
        if not is_list(prompt):
            raise InvalidRequest(f"A prompt is a text or a list of token ids, got {shown(prompt)}.", param="prompt")
        check_token_ids("prompt", prompt, self.tokenizer.token_count)
        return self.fit(None, list(prompt), params)

    def chat_job(self, messages: Any, params: SamplingParams) -> Job:
        """A conversation, rendered by the chat template. Raises InvalidRequest."""
        if not is_list(messages) or not all(isinstance(message, dict) for message in messages):
            raise InvalidRequest(
                f"A conversation is a list of {{'role': …, 'content': …}}, got {shown(messages)}.", param="messages"
            )
        text = self.tokenizer.render_chat(list(messages), add_generation_prompt=True)
        job = self.fit(text, self.tokenizer.encode(text, add_special_tokens=False), params)
        return msgspec.structs.replace(job, reply_prefix=self.tokenizer.reply_prefix)

    def fit(self, text: str | None, ids: list[int], params: SamplingParams) -> Job:
        """Token ids, which `text` was where there is one, with parameters complete. Raises InvalidRequest."""
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(
                f"Sampling parameters are SamplingParams, got {shown(params)}.", param="sampling_params"
            )
        params = self.tokenizer.banning(validate(params, token_count=self.tokenizer.token_count))
        if params.grammar is not None:
            self._try_out(params.grammar)
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
        return Job(text, ids, msgspec.structs.replace(params, max_tokens=wanted))

    def _try_out(self, asked: Grammar) -> None:
        """Compile a grammar here, so that what is wrong with it is known before the worker hears of it."""
        if asked in self._fine:
            return
        if self._compiler is None:
            self._compiler = Compiler(self.tokenizer.vocabulary(), self.client.info.limits.eos_token_ids)
        try:
            self._compiler.compile(asked)
        except GrammarError as error:
            raise InvalidRequest(f"{asked.field} cannot be used: {error}", param=asked.field) from None
        self._fine = {asked} if len(self._fine) >= FINE_GRAMMARS else self._fine | {asked}


def is_list(value: object) -> bool:
    """Texts and bytes are sequences too, but never of prompts, ids or messages."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


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
                "This engine is closed. Make another one."
                if self.here
                else "This engine belongs to the process that made it, not to a fork. Make one here."
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
    loop.run(client.stop("It was closed before the request was done."))
    loop.stop()
