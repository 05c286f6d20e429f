"""A process that tries grammars out, so that one that is too costly takes nobody along.

    python -m surefoot.api.grammar_helper        frames on stdin and stdout: a 4-byte length, then msgpack

The first frame is a Setup. Each Grammar after it is compiled in a fork of this process, which has limits of its own on
processor time and memory, and is answered by a Verdict. The end of file ends the process.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
from typing import IO, Final, TypeVar

import msgspec

from surefoot.bridge.wire import HEADER
from surefoot.config import MIB
from surefoot.grammar import Compiler, GrammarError
from surefoot.types import Grammar, Value, Vocabulary

CPU_SECONDS: Final = 2
MEMORY: Final = 256 * MIB
"""Bytes of address space beside what the process has before it compiles."""
STACK: Final = 4 * MIB
"""Half of what the worker has: a grammar so deep that it would overflow there does so here."""

T = TypeVar("T")


class Setup(Value, frozen=True, kw_only=True):
    """What grammars are compiled for."""

    vocabulary: Vocabulary
    eos: tuple[int, ...]


class Verdict(Value, frozen=True, kw_only=True):
    """What came of a grammar."""

    error: str | None = None
    """Why it does not compile."""
    costly: bool = False
    """It did not compile within the limits."""


def send(stream: IO[bytes], value: Value) -> None:
    """One frame. Raises OSError where nobody reads any more."""
    body = msgspec.msgpack.encode(value)
    stream.write(HEADER.pack(len(body)) + body)
    stream.flush()


def receive(stream: IO[bytes], kind: type[T]) -> T | None:
    """The next frame; None at the end of file."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (length,) = HEADER.unpack(header)
    return msgspec.msgpack.decode(stream.read(length), type=kind)


def main() -> None:
    """Answer until the end of file."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    setup = receive(requests, Setup)
    if setup is None:
        return
    compiler = Compiler(setup.vocabulary, setup.eos)
    while (grammar := receive(requests, Grammar)) is not None:
        send(answers, judged(compiler, grammar))


def judged(compiler: Compiler, grammar: Grammar) -> Verdict:
    """Compile in a fork; one that does not come to an end by itself was too costly."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = _compile(compiler, grammar, writing)
        finally:  # nothing of a fork may go on into the code around it
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        error = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        return Verdict(costly=True)
    return Verdict(error=error.decode() or None)


def _compile(compiler: Compiler, grammar: Grammar, writing: int) -> int:
    """In the fork: its exit status is 0 where the grammar was compiled, or refused for what it says."""
    with open(os.devnull, "wb") as nowhere:  # what the library says when it ends the process
        os.dup2(nowhere.fileno(), 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    if sys.platform == "linux":
        with open("/proc/self/statm") as sizes:
            most = int(sizes.read().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    errors: list[BaseException | None] = []
    threading.stack_size(STACK)
    thread = threading.Thread(target=lambda: errors.append(_error(compiler, grammar)))
    thread.start()
    thread.join()
    if isinstance(errors[0], GrammarError):
        os.write(writing, str(errors[0]).encode())
        return 0
    return 0 if errors[0] is None else 1


def _error(compiler: Compiler, grammar: Grammar) -> BaseException | None:
    try:
        compiler.compile(grammar)
    except BaseException as error:
        return error
    return None


if __name__ == "__main__":
    main()
