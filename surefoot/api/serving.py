"""From a checked request to text: tokenize, fit into the context, admit, and turn what the engine emits into deltas.

    prompt i of P, child c of n  →  choice i·n + c

One prompt is one request of the engine. A failing child fails its request, and a failing request fails the whole HTTP
request: the others are cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Final, TypeVar

import msgspec

from surefoot.api.choice import Choice
from surefoot.api.choice import Delta as Delta
from surefoot.api.choice import Job as Job
from surefoot.api.deadline import Deadline, Patience
from surefoot.api.dialects import dialect_of
from surefoot.api.engine import Engine, Handle
from surefoot.api.grammar import Checker
from surefoot.api.memory import Memory
from surefoot.api.metrics import Metrics
from surefoot.api.openai import ChatRequest, CompletionRequest, DetokenizeRequest, Prompt, TokenizeRequest
from surefoot.api.openai import Message as ChatMessage
from surefoot.api.reasoning import reasoning_of
from surefoot.api.template import Message, Tool
from surefoot.api.tokenizer import Tokenizer
from surefoot.errors import InsufficientMemory, InvalidRequest, NotFound, Overloaded
from surefoot.grammar import around, lark, quoted
from surefoot.sampling import check_token_ids, draw_seed, shown, validate
from surefoot.spec import GenerationDefaults
from surefoot.types import Emitted, SamplingParams

RETRY_AFTER: Final = 5
"""Seconds after which a refused client may come again."""
COMPLETION_MAX_TOKENS: Final = 16
"""OpenAI's default for completions; chat fills the context."""

_T = TypeVar("_T")


class Serving:
    """The API's state: engine, tokenizer, limits and the names of the model."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        metrics: Metrics,
        *,
        names: Sequence[str],
        max_preparing: int,
        defaults: GenerationDefaults,
        refuse_while_restarting: bool = False,
        refuse_while_sleeping: bool = False,
        patience: Patience = Patience(),
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> None:
        self._patience = patience
        self._refuse_while_restarting = refuse_while_restarting
        self._refuse_while_sleeping = refuse_while_sleeping
        self.engine, self.tokenizer, self.metrics = engine, tokenizer, metrics
        self.memory = Memory(engine)
        self.names = tuple(names)
        self.defaults = defaults
        self._dialect = dialect_of(tokenizer, tool_call_parser)
        self._reasoning = reasoning_of(tokenizer, reasoning_parser)
        self._checker = Checker(tokenizer.vocabulary, engine.info.limits.eos_token_ids)
        self._preparing = 0
        self._max_preparing = max_preparing

    @property
    def max_model_len(self) -> int:
        return self.engine.info.limits.max_model_len

    def check_open(self) -> None:
        """Raises Overloaded where a new request would not be served."""
        if self.engine.draining:
            raise Overloaded("The server is shutting down and takes no new requests.", retry_after=RETRY_AFTER)
        if self.engine.lost:
            raise Overloaded("The engine is not running.", retry_after=RETRY_AFTER)
        if self.engine.sleeping:
            if self._refuse_while_sleeping:
                raise Overloaded(
                    "The server sleeps. POST /wake_up, with an admin key, wakes it.", retry_after=RETRY_AFTER
                )
        elif self._refuse_while_restarting:
            self.check_worker()

    def check_worker(self) -> None:
        """Raises Overloaded where there is no worker just now."""
        if not (self.engine.alive or self.engine.sleeping):
            raise Overloaded("The engine's worker died and is being replaced.", retry_after=RETRY_AFTER)

    def check_model(self, model: str | None) -> str:
        """The name to answer with; the first one for a request that names none. Raises NotFound."""
        if model is None:
            return self.names[0]
        if model not in self.names:
            raise NotFound(
                f"The model {shown(model)} does not exist. This server has {', '.join(self.names)}.", param="model"
            )
        return model

    # ---- preparing --------------------------------------------------------------------------------------------------

    async def chat_job(self, request: ChatRequest, arrival: float) -> Job:
        """Render, tokenize and fit a chat. Raises RequestError."""
        params = self._params(request)
        self.check_model(request.model)
        tools, demanded = request.offered(), request.demanded()
        if demanded:
            params = self._demanding(params, demanded, several=request.parallel_tool_calls is not False)
        generation = request.add_generation_prompt is not False
        special = request.add_special_tokens is True

        def prepare() -> tuple[list[int], bool | None]:
            text = self._chat(request.messages, tools, generation, request.chat_template_kwargs)
            opened = None if self._reasoning is None else self._reasoning.opened(text)
            return self._text_ids(text, special=special, param="messages"), opened

        ids, opened = await self._prepare(prepare)
        prefix = self.tokenizer.reply_prefix if generation else ""
        params = await self._checked(params, opened, prefix)
        output = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        fitted = self._fit(ids, params, default=self.defaults.max_tokens, names=("messages", output))
        return Job(
            prompts=((ids, fitted),),
            priority=request.priority or 0,
            salt=request.cache_salt or "",
            arrival=arrival,
            reply_prefix=prefix,
            tools=frozenset(tool["function"]["name"] for tool in demanded or tools),
            forced=bool(demanded),
            one_call=request.parallel_tool_calls is False,
            opened=opened,
            timeout=request.timeout,
        )

    def _params(self, request: ChatRequest | CompletionRequest) -> SamplingParams:
        """The request's parameters over the model's defaults; `max_tokens` is left to `_fit`."""
        defaults = {name: value for name, value in self.defaults.given().items() if name != "max_tokens"}
        return self.tokenizer.banning(validate(request.params(defaults), token_count=self.tokenizer.token_count))

    async def _checked(self, params: SamplingParams, opened: bool | None = None, prefix: str = "") -> SamplingParams:
        """Parameters whose grammar, if there is one, compiles, and leaves the model what it begins with: its thoughts,
        and the newlines of `prefix`. Raises RequestError."""
        asked = params.grammar
        if asked is None:
            return params
        if opened is not None and self._reasoning is not None:
            asked = self._reasoning.before(asked, opened)
        elif prefix:
            asked = around(asked, f"start: {quoted(prefix)}? @answer")
        await self._checker.check(asked)
        return msgspec.structs.replace(params, grammar=asked)

    def _demanding(self, params: SamplingParams, tools: Sequence[dict[str, Any]], *, several: bool) -> SamplingParams:
        """Parameters with the grammar of a call. Raises InvalidRequest."""
        if self._dialect is None:
            raise self._no_tools("tools")
        asked = lark(self._dialect.grammar(tools, several=several), field="tools")
        return msgspec.structs.replace(params, grammar=asked)

    def _no_tools(self, param: str) -> InvalidRequest:
        return InvalidRequest(
            "This model's chat template knows no tools, or none in a form that this server reads.", param=param
        )

    async def completion_job(self, request: CompletionRequest, arrival: float) -> Job:
        """Tokenize and fit the prompts of a completion. Raises RequestError."""
        params = await self._checked(self._params(request))
        self.check_model(request.model)
        special = request.add_special_tokens is not False
        prompts = await self._prepare(lambda: [self._prompt_ids(prompt, special=special) for prompt in request.prompts])
        names = ("prompt", "max_tokens")
        default = self.defaults.max_tokens or COMPLETION_MAX_TOKENS
        fitted = [(ids, self._fit(ids, params, default=default, names=names)) for ids in prompts]
        if request.seed is None:  # otherwise prompts that are alike would get texts that are alike
            fitted[1:] = [(ids, msgspec.structs.replace(each, seed=draw_seed())) for ids, each in fitted[1:]]
        return Job(
            prompts=tuple(fitted),
            priority=request.priority or 0,
            salt=request.cache_salt or "",
            arrival=arrival,
            timeout=request.timeout,
        )

    async def chat_ids(self, request: ChatRequest) -> list[int]:
        """The prompt that a chat comes to, whether it fits or not. Raises RequestError."""
        self.check_model(request.model)

        def prepare() -> list[int]:
            text = self._chat(request.messages, request.offered(), True, request.chat_template_kwargs)
            return self.tokenizer.encode(text, add_special_tokens=False)

        return await self._prepare(prepare)

    async def tokenize(self, request: TokenizeRequest) -> tuple[list[int], list[str] | None]:
        """Ids, and strings where wanted, of a text or of a chat; no limit on their number but the body's."""
        self.check_model(request.model)
        return await self._prepare(lambda: self._tokenize(request))

    def _tokenize(self, request: TokenizeRequest) -> tuple[list[int], list[str] | None]:
        if request.messages is None:
            text, special = request.prompt or "", request.add_special_tokens is not False
        else:
            text = self._chat(request.messages, [], request.add_generation_prompt is not False)
            special = request.add_special_tokens is True
        ids = self.tokenizer.encode(text, add_special_tokens=special)
        return ids, [self.tokenizer.token_text(token) for token in ids] if request.return_token_strs else None

    async def detokenize(self, request: DetokenizeRequest) -> str:
        """The text of token ids."""
        self.check_model(request.model)
        return await self._prepare(lambda: self._detokenize(request.tokens))

    def _detokenize(self, tokens: list[int]) -> str:
        check_token_ids("tokens", tokens, self.tokenizer.token_count)
        return self.tokenizer.decode(tokens)

    async def _prepare(self, work: Callable[[], _T]) -> _T:
        """Run `work` off the event loop; how many may wait for that is bounded."""
        if self._preparing >= self._max_preparing:
            raise Overloaded("Too many prompts wait to be tokenized. Try again later.", retry_after=RETRY_AFTER)
        self._preparing += 1
        try:
            return await asyncio.to_thread(work)
        finally:
            self._preparing -= 1

    def _chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        generation: bool,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """A conversation as one text; `variables` are more for its template."""
        turns: Sequence[Message] = [message.turn() for message in messages]
        variable: Sequence[Tool] | None = None
        if tools or any(message.tool_calls or message.role == "tool" for message in messages):
            if self._dialect is None:
                raise self._no_tools("tools" if tools else "messages")
            turns, variable = self._dialect.render(turns, tools)
        return self.tokenizer.render_chat(turns, add_generation_prompt=generation, tools=variable, variables=variables)

    def _prompt_ids(self, prompt: Prompt, *, special: bool) -> list[int]:
        if isinstance(prompt, str):
            return self._text_ids(prompt, special=special, param="prompt")
        if len(prompt) >= self.max_model_len:
            raise self._too_long(len(prompt), 1, "prompt")
        check_token_ids("prompt", prompt, self.tokenizer.token_count)
        return prompt

    def _text_ids(self, text: str, *, special: bool, param: str) -> list[int]:
        least = self.tokenizer.min_tokens(text)
        if least >= self.max_model_len:
            raise InvalidRequest(
                f"This model's maximum context length is {self.max_model_len} tokens. However, your prompt has "
                f"{len(text)} characters, which are at least {least} tokens. Please reduce the length of the input "
                f"prompt. (parameter=input_text, value={len(text)})",
                param=param,
            )
        ids = self.tokenizer.encode(text, add_special_tokens=special)
        if not ids:
            raise InvalidRequest(f"{param} is empty: it has no tokens to continue from.", param=param)
        return ids

    def _fit(
        self, ids: list[int], params: SamplingParams, *, default: int | None, names: tuple[str, str]
    ) -> SamplingParams:
        """Parameters with `max_tokens` set, so that prompt and output fit; `names` are the fields of these two."""
        room = self.max_model_len - len(ids)
        wanted = params.max_tokens
        if wanted is None:
            wanted = room if default is None else min(default, room)
        if room < 1 or wanted > room:
            raise self._too_long(len(ids), max(wanted, 1), names[room > 0])
        if params.min_tokens > wanted:
            raise InvalidRequest(
                f"min_tokens must be at most max_tokens={wanted}, got {params.min_tokens}.", param="min_tokens"
            )
        return msgspec.structs.replace(params, max_tokens=wanted)

    def _too_long(self, prompt: int, output: int, param: str) -> InvalidRequest:
        return InvalidRequest(
            f"This model's maximum context length is {self.max_model_len} tokens. However, you requested {output} "
            f"output tokens and your prompt contains {prompt} input tokens, for a total of {prompt + output} tokens. "
            f"Please reduce the length of the input prompt or the number of requested output tokens. "
            f"(parameter=input_tokens, value={prompt})",
            param=param,
        )

    # ---- generating -------------------------------------------------------------------------------------------------

    async def generate(self, job: Job) -> AsyncGenerator[list[Delta], None]:
        """Admit a job and yield what each step brought. Raises RequestError; closing it cancels what still runs."""
        choices = [self._choice(index, job) for index in range(job.choices)]
        clock = self.metrics.clock(job.arrival, job.prompt_tokens)
        waited = time.monotonic() - job.arrival
        with (
            self._admitted(job) as handles,
            Deadline(self._patience.within(job.timeout), waited, handles, self.engine) as deadline,
        ):
            async with aclosing(merged(handles)) as steps:
                async for prompt, events in steps:
                    deadline.started()
                    deltas = [choices[prompt * job.n + event.child].take(event, handles[prompt]) for event in events]
                    deltas = [delta for delta in deltas if delta.tokens]
                    clock.step(deltas)
                    yield deltas
            if not all(choice.ended for choice in choices):
                deadline.check()
        clock.finished()

    def _choice(self, index: int, job: Job) -> Choice:
        markers = frozenset[int]() if self._reasoning is None or job.opened is None else self._reasoning.markers
        if self._dialect is None or not job.tools:
            return Choice(index, job, self.tokenizer, markers=markers)
        parser = self._dialect.parser(job.tools, forced=job.forced)
        return Choice(index, job, self.tokenizer, parser, markers=markers | self._dialect.markers)

    @contextmanager
    def _admitted(self, job: Job) -> Iterator[list[Handle]]:
        """Every prompt admitted, or none; on leaving nothing of the job runs any more."""
        longest = max(len(ids) for ids, _ in job.prompts)
        self.memory.check_room(longest)
        handles: list[Handle] = []
        try:
            for ids, params in job.prompts:
                handles.append(self.engine.submit(ids, params, priority=job.priority, salt=job.salt))
            yield handles
        except (InsufficientMemory, Overloaded) as error:
            error.details |= {"memory": self.memory.numbers(longest)}
            raise
        finally:
            for handle in handles:
                handle.cancel()

    async def complete(self, job: Job) -> list[Delta]:
        """The whole answer, a delta per choice. Raises RequestError."""
        totals = [Delta(choice) for choice in range(job.choices)]
        texts: list[list[str]] = [[] for _ in totals]
        thoughts: list[list[str]] = [[] for _ in totals]
        async with aclosing(self.generate(job)) as steps:
            async for deltas in steps:
                for delta in deltas:
                    total = totals[delta.choice]
                    total.tokens += delta.tokens
                    total.calls += delta.calls
                    total.cached = delta.cached
                    total.finish, total.stop_reason = delta.finish, delta.stop_reason
                    texts[delta.choice].append(delta.text)
                    thoughts[delta.choice].append(delta.reasoning)
        for total, said, thought in zip(totals, texts, thoughts, strict=True):
            total.text, total.reasoning = "".join(said), "".join(thought)
        return totals


async def merged(handles: Sequence[Handle]) -> AsyncGenerator[tuple[int, list[Emitted]], None]:
    """The events of several handles as they come, with the handle's position; raises as soon as one of them does."""
    if len(handles) == 1:
        async for events in handles[0]:
            yield 0, events
        return
    news: asyncio.Queue[tuple[int, list[Emitted] | Exception | None]] = asyncio.Queue(maxsize=len(handles))
    pumps = [asyncio.create_task(_pump(index, handle, news)) for index, handle in enumerate(handles)]
    try:
        running = len(pumps)
        while running:
            index, item = await news.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(index: int, handle: Handle, news: asyncio.Queue[Any]) -> None:
    try:
        async for events in handle:
            await news.put((index, events))
        await news.put((index, None))
    except Exception as error:
        await news.put((index, error))
