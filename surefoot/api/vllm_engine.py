"""vLLM's engines over our worker: AsyncLLMEngine for asyncio programs, LLM for scripts.

The worker is a process of its own, spoken to from an event loop in a thread of its own, so that an engine can be made
before the program has a loop and be used from any. A request that fails raises in its own generator and nowhere else.

    generate ─▶ job ─▶ (engine's loop) submit, events, text ─▶ latest outputs ─▶ (caller's loop) RequestOutput
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any, Final, Self

import msgspec

from surefoot.api.local import Job, LocalEngine
from surefoot.api.tokenizer import Tokenizer
from surefoot.api.vllm_args import EngineArgs
from surefoot.api.vllm_outputs import RequestMetrics, RequestOutput, completion
from surefoot.api.vllm_params import BadRequest, SamplingParams
from surefoot.api.vllm_request import Prompt, Stream, outputs_of, prepare, request_output, writers_of
from surefoot.errors import InvalidRequest, RequestError
from surefoot.sampling import shown

_NOT_HERE: Final = {
    "encode": "embeddings are not served",
    "add_lora": "adapters are not served", "remove_lora": "adapters are not served",
    "list_loras": "adapters are not served", "pin_lora": "adapters are not served",
    "collective_rpc": "there is one worker, and no code is sent to it",
    "start_profile": "profile the worker process with py-spy", "stop_profile": "profile the worker process with py-spy",
    "from_vllm_config": "make it with from_engine_args",
}  # fmt: skip


class EngineGenerateError(RuntimeError):
    """A request failed, alone; the engine goes on. `__cause__` is the RequestError, with its HTTP status."""


class EngineDeadError(RuntimeError):
    """The engine was shut down, or no worker is left and none will come."""


AsyncEngineDeadError = EngineDeadError
"""Its name in 2024."""


class AsyncLLMEngine:
    """vLLM's engine for asyncio programs. Make it with `from_engine_args`, in any thread, with or without a loop."""

    def __init__(self, engine_args: EngineArgs) -> None:
        """Raises StartupError where the model cannot be loaded, or an argument not be honoured."""
        self._engine = LocalEngine(engine_args.config(), policy=engine_args.policy())
        self._model = engine_args.model
        self._streams: dict[str, Stream] = {}
        self._closed = False

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        start_engine_loop: bool = True,
        usage_context: object = None,
        stat_loggers: object = None,
    ) -> Self:
        """Start a worker and load the model; the other arguments are vLLM's, and have no bearing here."""
        return cls(engine_args)

    def __getattr__(self, name: str) -> Any:
        reason = _NOT_HERE.get(name)
        raise AttributeError(f"{type(self).__name__} has no {name}{f' here: {reason}' if reason else ''}.")

    # ---- requests ---------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt | None = None,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        lora_request: None = None,
        trace_headers: Mapping[str, str] | None = None,
        *,
        inputs: Prompt | None = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs as they grow; closing the generator, or cancelling its task, aborts the request.

        `inputs` is the name of `prompt` in 2024. Raises BadRequest, a ValueError, for a request that is wrong,
        EngineGenerateError where this one failed, EngineDeadError where none can run any more.
        """
        if lora_request is not None:
            raise BadRequest("lora_request cannot be honoured: adapters are not served.", param="lora_request")
        self._check_alive()
        params = sampling_params if sampling_params is not None else SamplingParams()
        name = request_id if request_id is not None else uuid.uuid4().hex
        if name in self._streams:
            raise BadRequest(f"request_id={shown(name)} is running already.", param="request_id")
        given, options = prompt if prompt is not None else inputs, tokenization_kwargs
        stream = self._streams[name] = Stream(asyncio.get_running_loop())
        try:
            job = await asyncio.to_thread(prepare, self._engine, given, params, options or {})
            stream.start(self._engine, job, priority=priority)
            async for output in outputs_of(stream, name, job, params):
                yield output
        except RequestError as error:
            raise self._translated(error) from error
        finally:
            stream.close()
            del self._streams[name]

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests: each yields a last output with finish_reason "abort". One that is not there is no error."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            if name in self._streams:
                self._streams[name].abort()

    def _translated(self, error: RequestError) -> Exception:
        if isinstance(error, BadRequest):
            return error
        if isinstance(error, InvalidRequest):
            return BadRequest(error.message, param=error.param)
        return (EngineDeadError if self.errored else EngineGenerateError)(error.message)

    # ---- state ------------------------------------------------------------------------------------------------------

    @property
    def errored(self) -> bool:
        """True when no request can run any more. A failed request does not bring that about, nor a worker's death."""
        return self._closed or self._engine.client.lost

    @property
    def is_running(self) -> bool:
        return not self.errored

    @property
    def is_stopped(self) -> bool:
        return self.errored

    @property
    def dead_error(self) -> EngineDeadError:
        return EngineDeadError("The engine was shut down, or no worker is left and none will come.")

    def _check_alive(self) -> None:
        if self.errored:
            raise self.dead_error

    async def check_health(self) -> None:
        """Raises EngineDeadError where no request can run any more."""
        self._check_alive()

    async def get_tokenizer(self, lora_request: None = None) -> TokenizerFacade:
        return TokenizerFacade(self._engine.tokenizer)

    async def get_model_config(self) -> ModelConfig:
        return ModelConfig(model=self._model, max_model_len=self._engine.max_model_len)

    async def do_log_stats(self) -> None:
        """Nothing: a program's engine keeps no statistics; `surefoot serve` has /metrics."""

    async def is_tracing_enabled(self) -> bool:
        return False

    def start_background_loop(self) -> None:
        """Nothing: it runs."""

    def shutdown(self, timeout: float | None = None) -> None:
        """End the worker; requests that still run raise. Done by itself at the interpreter's end; twice is fine."""
        self._closed = True
        self._engine.close()

    shutdown_background_loop = shutdown


AsyncLLM = AsyncLLMEngine
"""Its name today."""


class LLM:
    """vLLM's engine for scripts: prompts in, outputs in their order."""

    def __init__(self, model: str, **options: Any) -> None:
        """`options` are those of EngineArgs. Raises StartupError."""
        self._engine = LocalEngine(EngineArgs(model, **options).config())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = True,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, all at once. `prompt_token_ids` is how ids were given in 2024.

        Raises BadRequest before anything runs where a prompt or its parameters are wrong. A prompt that fails while it
        runs fails alone: its output says so in `error`, and in finish_reason "error".
        """
        listed = _listed(prompts if prompts is not None else prompt_token_ids)
        params = _per_prompt(sampling_params, self.get_default_sampling_params(), len(listed))
        jobs = [self._prepared(prompt, each) for prompt, each in zip(listed, params, strict=True)]
        return self._run(jobs, params, list(priority or [0] * len(jobs)))

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list of them. Errors are those of `generate`."""
        chats = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        params = _per_prompt(sampling_params, self.get_default_sampling_params(), len(chats))
        jobs = [self._prepared(chat, each, chat=True) for chat, each in zip(chats, params, strict=True)]
        return self._run(jobs, params, [0] * len(jobs))

    def get_tokenizer(self) -> TokenizerFacade:
        return TokenizerFacade(self._engine.tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends: used where a call gives none."""
        return SamplingParams(**self._engine.generation_defaults.given())

    def shutdown(self) -> None:
        """End the worker. Done by itself when the object or the interpreter goes."""
        self._engine.close()

    def _prepared(self, prompt: Any, params: SamplingParams, *, chat: bool = False) -> Job:
        try:
            return self._engine.chat_job(prompt, params.native()) if chat else prepare(self._engine, prompt, params, {})
        except InvalidRequest as error:
            raise BadRequest(error.message, param=error.param) from error

    def _run(self, jobs: list[Job], params: list[SamplingParams], priority: list[int]) -> list[RequestOutput]:
        async def all_of_them() -> list[RequestOutput]:
            room = asyncio.Semaphore(2 * self._engine.client.info.limits.max_num_seqs)

            async def one(index: int) -> RequestOutput:
                async with room:
                    return await self._complete(str(index), jobs[index], params[index], priority[index])

            return list(await asyncio.gather(*map(one, range(len(jobs)))))

        return self._engine.loop.run(all_of_them())

    async def _complete(self, name: str, job: Job, params: SamplingParams, priority: int) -> RequestOutput:
        writers = writers_of(self._engine, job)
        metrics, error = RequestMetrics(arrival_time=time.time()), None
        try:
            async with self._engine.client.submit(job.ids, job.params, priority=priority) as handle:
                async for events in handle:
                    for event in events:
                        writers[event.child].take(event, handle)
                        metrics.grew(event.cached)
        except RequestError as reason:
            error = reason
        outputs = [completion(writer.output, shown=params.detokenize) for writer in writers]
        if error is not None:
            outputs = [msgspec.structs.replace(output, finish_reason="error") for output in outputs]
        return request_output(name, job, outputs, metrics, error)


def _listed(prompts: Any) -> list[Any]:
    """One prompt, or a list of them."""
    if prompts is None:
        raise BadRequest("prompts: there are none.", param="prompts")
    if isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int)):
        return [prompts]
    return list(prompts)


def _per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, default: SamplingParams, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or default] * count
    if len(params) != count:
        raise BadRequest(f"{len(params)} sampling_params were given for {count} prompts.", param="sampling_params")
    return list(params)


# ---- what programs ask of the engine --------------------------------------------------------------------------------


class ModelConfig(msgspec.Struct, frozen=True):
    """What programs read of vLLM's."""

    model: str
    max_model_len: int


class TokenizerFacade:
    """Our tokenizer under the names that programs know from transformers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = tokenizer.eos_token_id, tokenizer.bos_token_id
        self.vocab_size = tokenizer.token_count

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, conversation: Sequence[Any], tokenize: bool = True, add_generation_prompt: bool = False
    ) -> str | list[int]:
        """A conversation as a text, or as the ids of that text."""
        text = self._tokenizer.render_chat(conversation, add_generation_prompt=add_generation_prompt)
        return self._tokenizer.encode(text, add_special_tokens=False) if tokenize else text
