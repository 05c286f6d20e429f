"""Replies whose stream tells, in named events, how one object grows: OpenAI's responses, Anthropic's messages."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from surefoot.api.serving import Serving
from surefoot.api.sse import event_frame

Json = dict[str, Any]


class NarratedReply:
    """One object, `json`, as it is now. Kinds of it say what happens in a step."""

    json: Json

    def events(self, serving: Serving) -> AsyncGenerator[list[Json], None]:
        """Generate, let the object grow, and yield the events of each step. Raises RequestError."""
        raise NotImplementedError

    async def run(self, serving: Serving) -> Json:
        """The object as it is in the end. Raises RequestError."""
        async with aclosing(self.events(serving)) as steps:
            async for _ in steps:
                pass
        return self.json

    async def frames(self, serving: Serving) -> AsyncGenerator[bytes, None]:
        """The events of each step in one piece. Raises RequestError, after the events that tell of it."""
        async with aclosing(self.events(serving)) as steps:
            async for events in steps:
                if events:
                    yield b"".join(event_frame(event["type"], event) for event in events)
