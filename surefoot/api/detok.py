"""Token ids → text as they come: what is returned is final, what may still change is held back.

bytes of tokens:  T h e _ c a f [C3          a character's first byte waits for the second
text:             T h e _ c a | f ]          with the stop string "fin", an f at the end waits too
                  └─ final ───┘└ held
"""

from __future__ import annotations

import codecs

from surefoot.api.tokenizer import Tokenizer

_Utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Text of one output. The pieces of all `push` and of `finish`, joined, are `Tokenizer.decode` of the tokens, cut
    where the first stop string is complete; where two are at the same character, the longer one counts.

    A push costs time proportional to the token's text, however long the output is.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        prefix: str = "",
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """`prefix` is dropped where the output starts with it, or with a part of it; `shown` are never skipped."""
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids - shown if skip_special_tokens else frozenset[int]()
        self._include_stop = include_stop
        self._stops = [_StopMatcher(text) for text in sorted(stop, key=len, reverse=True) if text]
        self._first_chars = frozenset(text[0] for text in stop if text)
        self._utf8 = _Utf8(errors="replace")
        self._strip_space = tokenizer.strips_first_space
        self._prefix = prefix
        self._held = ""
        self.stopped: str | None = None
        """The stop string that ended the output; from then on nothing is returned."""
        self.offset = 0
        """Characters decoded so far, returned or held: where the next token's text begins."""

    def push(self, token: int, *, check_stop: bool = True) -> str:
        """Add a token; returns the text that is final now, often none.

        With `check_stop=False` (below min_tokens) a stop string that this token completes does not count, one that a
        later token completes does.
        """
        if token in self._hidden:
            return ""
        data = self._tokenizer.token_bytes(token)
        if self._strip_space and data:
            data, self._strip_space = data.removeprefix(b" "), False
        text = self._utf8.decode(data)
        return self._advance(self._unprefixed(text) if self._prefix else text, check_stop)

    def finish(self) -> str:
        """The text that was held back, now that no token follows: bytes of an unfinished character become U+FFFD."""
        text = self._advance(self._utf8.decode(b"", final=True), True)
        rest, self._held = self._held, ""
        return text + rest

    def _unprefixed(self, text: str) -> str:
        """`text` without what it has of the prefix; the first character that is not of it ends that."""
        for at, char in enumerate(text):
            if not self._prefix.startswith(char):
                self._prefix = ""
                return text[at:]
            self._prefix = self._prefix[1:]
        return ""

    def _advance(self, text: str, check_stop: bool) -> str:
        if self.stopped is not None:
            return ""
        self.offset += len(text)
        if not self._held and self._first_chars.isdisjoint(text):
            return text
        before = len(self._held)
        self._held += text
        for at, char in enumerate(text, start=before + 1):
            for stop in self._stops:
                if stop.feed(char) and check_stop:
                    return self._stop(stop.text, at)
        keep = max(stop.matched for stop in self._stops)
        final = len(self._held) - keep
        text, self._held = self._held[:final], self._held[final:]
        return text

    def _stop(self, stop: str, end: int) -> str:
        """End the output at the stop string that ends at character `end` of what is held."""
        self.stopped = stop
        text, self._held = self._held[: end if self._include_stop else end - len(stop)], ""
        return text


class _StopMatcher:
    """Knuth, Morris and Pratt (1977): how much of `text` the characters fed so far end with, in constant time each."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        # fallback[k]: length of the longest proper prefix of text[:k] that text[:k] also ends with.
        self._fallback = [0, 0]
        length = 0
        for char in text[1:]:
            length = self._step(length, char)
            self._fallback.append(length)

    def feed(self, char: str) -> bool:
        """Take the next character; True if `text` is complete with it, after which a new match may overlap it."""
        self.matched = self._step(self.matched, char)
        if self.matched == len(self.text):
            self.matched = self._fallback[self.matched]
            return True
        return False

    def _step(self, length: int, char: str) -> int:
        while length and self.text[length] != char:
            length = self._fallback[length]
        return length + 1 if self.text[length] == char else 0
