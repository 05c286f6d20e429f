"""What is generated for a request, and one choice of it as it grows: text, calls, and why it ended."""

from __future__ import annotations

import msgspec

from surefoot.api.detok import Detokenizer
from surefoot.api.engine import Handle
from surefoot.api.reasoning import ReasoningParser
from surefoot.api.tokenizer import Tokenizer
from surefoot.api.tools import ToolCall, ToolParser
from surefoot.types import Emitted, Sampled, SamplingParams, Value


class Job(Value, frozen=True, kw_only=True):
    """What to generate: each prompt with its own parameters, alike but for `max_tokens` and a drawn seed."""

    prompts: tuple[tuple[list[int], SamplingParams], ...]
    priority: int
    salt: str
    arrival: float
    """Monotonic seconds, before tokenizing."""
    reply_prefix: str = ""
    """What an answer starts with and does not contain."""
    tools: frozenset[str] = frozenset()
    """Names of the functions that an answer may call."""
    forced: bool = False
    """An answer is a call: its grammar sees to that."""
    one_call: bool = False
    """Of the calls in an answer only the first counts."""
    opened: bool | None = None
    """Whether the prompt has begun the model's thoughts; None: they are not told apart."""
    timeout: float | None = None
    """Seconds from arrival that the request gives itself."""

    @property
    def n(self) -> int:
        return self.prompts[0][1].n

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def prompt_tokens(self) -> int:
        return sum(len(ids) for ids, _ in self.prompts)


class Delta(msgspec.Struct):
    """What one choice gained: `text` is final, `tokens` are all that were counted, shown or not."""

    choice: int
    text: str = ""
    reasoning: str = ""
    """What the model thinks before it answers."""
    tokens: list[Sampled] = []
    calls: tuple[ToolCall, ...] = ()
    finish: str | None = None
    stop_reason: str | int | None = None
    cached: int = 0
    """Prompt tokens that the prefix cache spared."""


class Choice:
    """The text, and the calls of tools, of one choice as it grows."""

    def __init__(
        self,
        index: int,
        job: Job,
        tokenizer: Tokenizer,
        parser: ToolParser | None = None,
        markers: frozenset[int] = frozenset(),
    ) -> None:
        self._index, self._params = index, job.prompts[index // job.n][1]
        self._parser, self._one_call = parser, job.one_call
        self._thoughts = None if job.opened is None else ReasoningParser(opened=job.opened)
        self.ended = self._called = False
        params = self._params
        self._detok = Detokenizer(
            tokenizer,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            prefix=job.reply_prefix,
            shown=markers,
        )

    def take(self, event: Emitted, handle: Handle) -> Delta:
        """What `event` adds; a delta without tokens once the choice has ended."""
        delta = Delta(self._index)
        if self.ended:
            return delta
        delta.tokens = [event.sampled]
        delta.cached = event.cached
        if event.stop_token is None or self._params.include_stop_str_in_output:
            delta.text = self._detok.push(event.sampled.token, check_stop=event.index >= self._params.min_tokens)
        if self._detok.stopped is None and event.finish is not None:
            delta.text += self._detok.finish()
        if self._detok.stopped is not None:
            delta.finish, delta.stop_reason = "stop", self._detok.stopped
            handle.cancel(event.child)
        elif event.finish is not None:
            delta.finish = event.finish
            delta.stop_reason = event.stop_token if event.stop_token in self._params.stop_token_ids else None
        self.ended = delta.finish is not None
        if self._thoughts is not None:
            self._think(self._thoughts, delta)
        if self._parser is not None:
            self._parse(self._parser, delta, event.stop_token)
        return delta

    def _think(self, parser: ReasoningParser, delta: Delta) -> None:
        """Take thoughts out of the text."""
        delta.reasoning, delta.text = parser.push(delta.text)
        if self.ended:
            rest = parser.finish()
            delta.reasoning, delta.text = delta.reasoning + rest.reasoning, delta.text + rest.text

    def _parse(self, parser: ToolParser, delta: Delta, stop_token: int | None) -> None:
        """Take calls out of the text."""
        text, calls = parser.push(delta.text)
        if self.ended:
            more = parser.finish(stop_token)
            text, calls = text + more.text, calls + more.calls
        if self._one_call:
            calls = () if self._called else calls[:1]
        self._called = self._called or bool(calls)
        delta.text, delta.calls = text, calls
        if self._called and delta.finish == "stop":
            delta.finish = "tool_calls"
