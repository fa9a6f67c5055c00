"""Owns the trial of a grammar: a process of its own compiles it first, with little time and memory.

It must not know tokens. A schema or a grammar is a program that a stranger wrote for a compiler. Most of what takes too
long can be refused by counting, but not all (22 patterns that meet in one string take a minute), and a compiler that
runs away in a thread can be stopped by nobody.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref

import llguidance

from jaxpage.errors import ParameterError
from jaxpage.grammar.grammar_text import name_of

TIME_LIMIT_S = 5.0
QUICK_S = 1.0
"""Of a schema that fails later than this the place is not searched: that takes as long again."""
START_LIMIT_S = 60.0
MEMORY_LIMIT_BYTES = 4 << 30
"""Address space of the process."""
LIMITS = llguidance.LLParserLimits(
    max_items_in_row=10_000,  # an optional property is up to 4 items, and an object may have 1,000
    verbose_errors=False,
)

_idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()


def tried(kind: str, text: str) -> str:
    """The grammar for ``kind`` and ``text`` (see ``grammar_text``), after it compiled elsewhere.

    Raises:
        ParameterError: if it is malformed, not supported, or takes too much time or memory.
    """
    worker = _take()
    answer = worker.ask(json.dumps([kind, text]), TIME_LIMIT_S)
    if answer is None:
        raise ParameterError(name_of(kind), f"takes more than {TIME_LIMIT_S:g} s, or too much memory, to compile")
    if worker.is_alive:
        _idle.put(worker)
    is_fine, message = json.loads(answer)
    if not is_fine:
        raise ParameterError(name_of(kind), message)
    return message


def _take() -> _Worker:
    with contextlib.suppress(queue.Empty):
        while True:
            worker = _idle.get_nowait()
            if worker.is_alive:
                return worker
    return _Worker()


class _Worker:
    """A child process that takes one question at a time."""

    def __init__(self) -> None:
        # The child must find what its parent found, however that was started.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from jaxpage.grammar.trial import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        self._stop = weakref.finalize(self, _stop, self._process)
        self._is_late = False
        if self._read_line(START_LIMIT_S) is None:
            raise RuntimeError("the process that tries grammars did not start")

    @property
    def is_alive(self) -> bool:
        """Whether it can take a question."""
        return not self._is_late and self._process.poll() is None

    def ask(self, question: str, time_limit_s: float) -> str | None:
        """The child's answer; None, and the child's end, if there is none in time."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(question.encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            self._stop()
            return None
        return self._read_line(time_limit_s)

    def _read_line(self, time_limit_s: float) -> str | None:
        assert self._process.stdout is not None
        clock = threading.Timer(time_limit_s, self._give_up)
        clock.start()
        line = self._process.stdout.readline()
        clock.cancel()
        if not line.endswith(b"\n"):
            self._stop()
            return None
        return line.decode()

    def _give_up(self) -> None:
        self._is_late = True
        self._process.kill()


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with contextlib.suppress(OSError):
        process.communicate()


def _answer(kind: str, text: str) -> tuple[bool, str]:
    from jaxpage.grammar.grammar_text import grammar_text, is_lark, with_place

    try:
        grammar = grammar_text(kind, text)
    except ParameterError as error:
        return False, error.reason
    began_s = time.monotonic()
    reason = _refusal(grammar, is_lark(kind, text))
    if reason is None:
        return True, grammar
    is_quick = time.monotonic() - began_s < QUICK_S
    return False, with_place(text, reason, _refusal) if kind == "json" and is_quick else reason


def _refusal(grammar: str, lines_count: bool = False) -> str | None:
    """Why a grammar does not compile; None if it does."""
    from jaxpage.grammar.grammar_text import reason_of

    failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS)
    return reason_of(messages[0], lines_count) if failed else None


def main() -> None:
    """Says that it is there, then answers each line of standard input with a line."""
    if importlib.util.find_spec("resource"):
        import resource

        with contextlib.suppress(ValueError, OSError):  # not every system has this limit
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    print("ready", flush=True)
    for line in sys.stdin.buffer:
        _set_alarm(int(TIME_LIMIT_S) + 5)  # ends this process where a parent that is gone cannot
        print(json.dumps(_answer(*json.loads(line))), flush=True)
        _set_alarm(0)


def _set_alarm(seconds: int) -> None:
    if hasattr(signal, "alarm"):
        signal.alarm(seconds)
