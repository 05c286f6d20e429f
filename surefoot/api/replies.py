"""The shapes of OpenAI's answers, whole and in chunks, out of the deltas of `serving`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Final

from surefoot.api.openai import ChatRequest, CompletionRequest
from surefoot.api.serving import Delta, Job, Serving
from surefoot.api.sse import DONE, frame
from surefoot.api.tokenizer import Tokenizer
from surefoot.api.tools import ToolCall
from surefoot.types import Sampled

_LEAST_LOGPROB: Final = -9999.0
"""Stands for minus infinity, which JSON cannot say."""

Json = dict[str, Any]


class Reply:
    """What chat and completions have in common. One object answers one request."""

    prefix: str
    object: str
    chunk_object: str

    def __init__(self, request: ChatRequest | CompletionRequest, job: Job, model: str, tokenizer: Tokenizer) -> None:
        self._job, self._tokenizer = job, tokenizer
        self._with_logprobs = request.alternatives() is not None
        self._with_ids = bool(request.return_token_ids)
        self._include_usage, self._continuous_usage = request.include_usage, request.continuous_usage
        self._completion_tokens = 0
        self._cached: dict[int, int] = {}  # prompt → tokens of it that were cached
        self._head: Json = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    # ---- per endpoint -----------------------------------------------------------------------------------------------

    def opening(self) -> list[Json]:
        """The chunks that go before any text."""
        raise NotImplementedError

    def gain(self, delta: Delta) -> Json:
        """The choice of a chunk that carries text."""
        raise NotImplementedError

    def ending(self, delta: Delta) -> Json:
        """The choice of a chunk that carries a finish reason."""
        raise NotImplementedError

    def choice(self, total: Delta) -> Json:
        """The choice of a whole answer."""
        raise NotImplementedError

    # ---- whole ------------------------------------------------------------------------------------------------------

    async def whole(self, serving: Serving) -> Json:
        """Generate and answer at once. Raises RequestError."""
        totals = await serving.complete(self._job)
        for total in totals:
            self._count(total)
        choices = [self.choice(total) for total in self.kept(totals)]
        return {**self._head, "object": self.object, "choices": choices, "usage": self._usage()} | self._extras()

    def kept(self, totals: Sequence[Delta]) -> Sequence[Delta]:
        """The choices that are answered with, of those that were generated."""
        return totals

    def _extras(self) -> Json:
        return {}

    # ---- streamed ---------------------------------------------------------------------------------------------------

    async def frames(self, serving: Serving) -> AsyncGenerator[bytes, None]:
        """Generate and yield the events of each step in one piece. Raises RequestError."""
        opened = False
        async with aclosing(serving.generate(self._job)) as steps:
            async for deltas in steps:
                chunks = [] if opened else self.opening()
                opened = True
                for delta in deltas:
                    self._count(delta)
                    chunks += [self._chunk([choice]) for choice in self._pieces(delta)]
                if chunks:
                    yield b"".join(map(frame, chunks))
        last = frame(self._chunk([], self._usage())) if self._include_usage else b""
        yield last + DONE

    def _pieces(self, delta: Delta) -> list[Json]:
        gained = delta.text or delta.reasoning or delta.calls or self._with_logprobs or self._with_ids
        pieces = [self.gain(delta)] if gained else []
        return pieces if delta.finish is None else [*pieces, self.ending(delta)]

    def _chunk(self, choices: list[Json], usage: Json | None = None) -> Json:
        chunk = {**self._head, "object": self.chunk_object, "choices": choices}
        if usage is None and self._continuous_usage:
            usage = self._usage()
        return chunk | {"usage": usage} if self._include_usage else chunk

    def _count(self, delta: Delta) -> None:
        self._completion_tokens += len(delta.tokens)
        self._cached[delta.choice // self._job.n] = delta.cached

    def _usage(self) -> Json:
        prompt, completion = self._job.prompt_tokens, self._completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }

    def _ids(self, delta: Delta) -> Json:
        return {"token_ids": [sampled.token for sampled in delta.tokens]} if self._with_ids else {}


class ChatReply(Reply):
    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, request: ChatRequest, job: Job, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(request, job, model, tokenizer)
        self._called: dict[int, int] = {}
        """Calls sent so far, by choice."""

    def opening(self) -> list[Json]:
        start = {"role": "assistant", "content": ""}
        chunks = [self._chunk([self._piece(index, start, None)]) for index in range(self._job.choices)]
        chunks[0] |= self._extras()
        return chunks

    def gain(self, delta: Delta) -> Json:
        gained: Json = {"content": delta.text} if delta.text or not (delta.calls or delta.reasoning) else {}
        if delta.reasoning:
            gained["reasoning_content"] = delta.reasoning
        if delta.calls:
            first = self._called.get(delta.choice, 0)
            self._called[delta.choice] = first + len(delta.calls)
            gained["tool_calls"] = [{"index": at, **_call(call)} for at, call in enumerate(delta.calls, start=first)]
        return self._piece(delta.choice, gained, self._logprobs(delta)) | self._ids(delta)

    def ending(self, delta: Delta) -> Json:
        ending = self._piece(delta.choice, {}, None)
        return ending | {"finish_reason": delta.finish, "stop_reason": delta.stop_reason}

    def choice(self, total: Delta) -> Json:
        message: Json = {"role": "assistant", "content": total.text, "refusal": None}
        if total.calls:
            message |= {"content": total.text or None, "tool_calls": [_call(call) for call in total.calls]}
        if total.reasoning:
            message["reasoning_content"] = total.reasoning
        return {
            "index": total.choice,
            "message": message,
            "logprobs": self._logprobs(total),
            "finish_reason": total.finish,
            "stop_reason": total.stop_reason,
        } | self._ids(total)

    def _extras(self) -> Json:
        return {"prompt_token_ids": self._job.prompts[0][0]} if self._with_ids else {}

    def _piece(self, index: int, delta: Json, logprobs: Json | None) -> Json:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, delta: Delta) -> Json | None:
        if not self._with_logprobs:
            return None
        return {"content": [self._entry(sampled) for sampled in delta.tokens], "refusal": None}

    def _entry(self, sampled: Sampled) -> Json:
        top = [self._token(token, logprob) for token, logprob in sampled.top]
        return self._token(sampled.token, sampled.logprob) | {"top_logprobs": top}

    def _token(self, token: int, logprob: float | None) -> Json:
        return {
            "token": self._tokenizer.token_text(token),
            "logprob": finite(logprob),
            "bytes": list(self._tokenizer.token_bytes(token)),
        }


class CompletionReply(Reply):
    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, request: CompletionRequest, job: Job, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(request, job, model, tokenizer)
        self._offsets = [0] * job.choices
        self._opened: set[int] = set()
        self._n = request.n or 1
        """Choices of each prompt that are answered with; best_of may ask for more to choose from."""
        self._echoed = [self._prompt_text(prompt) for prompt in request.prompts] if request.echo else None

    def _prompt_text(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    def opening(self) -> list[Json]:
        if self._echoed is None:
            return []
        echoes = [Delta(choice, self._echoed[choice // self._n]) for choice in range(self._job.choices)]
        return [self._chunk([self._piece(echo, echo.text, None)]) for echo in echoes]

    def kept(self, totals: Sequence[Delta]) -> Sequence[Delta]:
        """Of each prompt the likeliest per token, likeliest first, and numbered anew."""
        if self._job.n == self._n:
            return totals
        best: list[Delta] = []
        for first in range(0, len(totals), self._job.n):
            best += sorted(totals[first : first + self._job.n], key=_mean_logprob, reverse=True)[: self._n]
        for choice, total in enumerate(best):
            total.choice = choice
        return best

    def gain(self, delta: Delta) -> Json:
        return self._piece(delta, delta.text, self._logprobs(delta)) | self._ids(delta)

    def ending(self, delta: Delta) -> Json:
        ending = self._piece(delta, "", None)
        return ending | {"finish_reason": delta.finish, "stop_reason": delta.stop_reason}

    def choice(self, total: Delta) -> Json:
        if self._echoed is not None:
            total.text = self._echoed[total.choice // self._n] + total.text
        return self.gain(total) | {"finish_reason": total.finish, "stop_reason": total.stop_reason}

    def _piece(self, delta: Delta, text: str, logprobs: Json | None) -> Json:
        return {"index": delta.choice, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _ids(self, delta: Delta) -> Json:
        ids = super()._ids(delta)
        if ids and delta.choice not in self._opened:
            self._opened.add(delta.choice)
            ids["prompt_token_ids"] = self._job.prompts[delta.choice // self._n][0]
        return ids

    def _logprobs(self, delta: Delta) -> Json | None:
        if not self._with_logprobs:
            return None
        texts = [self._tokenizer.token_text(sampled.token) for sampled in delta.tokens]
        return {
            "tokens": texts,
            "token_logprobs": [finite(sampled.logprob) for sampled in delta.tokens],
            "top_logprobs": [self._top(sampled) for sampled in delta.tokens],
            "text_offset": self._advance(delta.choice, texts),
        }

    def _advance(self, choice: int, texts: Sequence[str]) -> list[int]:
        """Where each token starts in the text, in characters."""
        offsets = []
        for text in texts:
            offsets.append(self._offsets[choice])
            self._offsets[choice] += len(text)
        return offsets

    def _top(self, sampled: Sampled) -> dict[str, float | None]:
        """Likeliest first; the drawn token is always there. Of two tokens that look alike the likelier one stays."""
        top: dict[str, float | None] = {}
        for token, logprob in (*sampled.top, (sampled.token, sampled.logprob)):
            top.setdefault(self._tokenizer.token_text(token), finite(logprob))
        return top


def _call(call: ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def finite(logprob: float | None) -> float | None:
    """As JSON can say it."""
    return None if logprob is None else max(logprob, _LEAST_LOGPROB)


def _mean_logprob(total: Delta) -> float:
    return sum(sampled.logprob or 0.0 for sampled in total.tokens) / max(1, len(total.tokens))
