"""Owns telling what a model thinks, between ``<think>`` and ``</think>``, from what it answers.

It must not know what is in the answer.
"""

from __future__ import annotations

import enum

from jaxpage.server.tools.markers import split_at_marker
from jaxpage.server.tools.parts import AnswerReader, Part, Reasoning

OPEN = "<think>"
CLOSE = "</think>"


class _Stage(enum.Enum):
    START = enum.auto()
    THINKING = enum.auto()
    BETWEEN = enum.auto()
    ANSWER = enum.auto()


class ThinkReader:
    """Reads the thoughts at the start of a text and leaves the rest to ``answer``.

    Thoughts are only where a model writes them: at the very start, blanks apart. ``<think>`` further on is text like
    any other, so an answer may speak of it. Line breaks and blanks around the markers are no part of either side,
    except those that end the thoughts.

    Args:
        is_open: the prompt ends within ``<think>``, so the text starts with thoughts.
    """

    markers = (OPEN, CLOSE)

    def __init__(self, answer: AnswerReader, is_open: bool) -> None:
        self._answer = answer
        self._stage = _Stage.THINKING if is_open else _Stage.START
        self._is_first = True
        self._pending = ""

    @property
    def has_open_call(self) -> bool:
        """True while a call has begun and not ended."""
        return self._answer.has_open_call

    def feed(self, text: str) -> list[Part]:
        """The parts that ``text`` makes certain."""
        if self._stage is _Stage.ANSWER:
            return self._answer.feed(text)
        self._pending += text
        parts: list[Part] = []
        if self._stage is _Stage.START:
            self._read_start()
        if self._stage is _Stage.THINKING:
            self._think(parts)
        if self._stage is _Stage.BETWEEN and self._pending.strip():
            self._pending = self._pending.lstrip()
            self._stage = _Stage.ANSWER
        if self._stage is _Stage.ANSWER:
            parts += self._answer.feed(self._pending)
            self._pending = ""
        return parts

    def finish(self) -> list[Part]:
        """What was held back; thoughts that were never closed stay thoughts."""
        parts: list[Part] = []
        if self._stage is _Stage.THINKING:
            self._add(self._pending, parts)
        elif self._stage is _Stage.START:
            parts += self._answer.feed(self._pending)
        return parts + self._answer.finish()

    def _read_start(self) -> None:
        text = self._pending.lstrip()
        if text.startswith(OPEN):
            self._stage, self._pending = _Stage.THINKING, text[len(OPEN) :]
        elif not OPEN.startswith(text):
            self._stage = _Stage.ANSWER

    def _think(self, parts: list[Part]) -> None:
        before, marker, self._pending = split_at_marker(self._pending, (CLOSE,))
        self._add(before, parts)
        if marker is not None:
            self._stage = _Stage.BETWEEN

    def _add(self, text: str, parts: list[Part]) -> None:
        if self._is_first:
            text = text.lstrip()
        if text:
            self._is_first = False
            parts.append(Reasoning(text))


def ends_within_thoughts(prompt: str, continued: str) -> bool:
    """True if ``prompt`` itself opens thoughts at its end, or the final message ``continued`` has some left open."""
    return prompt.rstrip().endswith(OPEN) or continued.rfind(OPEN) > continued.rfind(CLOSE)
