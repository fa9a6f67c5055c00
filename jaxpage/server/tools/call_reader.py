"""Owns reading one call that is written as a JSON object, while it is being written.

It must not know what stands around the object.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Container

from jaxpage.server.tools.json_scanner import JsonScanner, NotJsonError, State
from jaxpage.server.tools.parts import CallArguments, Part, new_call

_ARGUMENT_KEYS = ("arguments", "parameters")
USUAL_KEYS = ("name", "type", "id", *_ARGUMENT_KEYS)


class Progress(enum.Enum):
    """How far a call is. BROKEN: it began and then stopped being JSON. REFUSED: it never was a call."""

    UNCERTAIN = enum.auto()
    BEGUN = enum.auto()
    COMPLETE = enum.auto()
    BROKEN = enum.auto()
    REFUSED = enum.auto()


class CallReader:
    """Reads ``{"name": ..., "arguments": {...}}``; ``parameters`` means ``arguments``, other keys nothing.

    The call begins when its name is known and its arguments have begun. From then on arguments are passed on as they
    are written, character by character. Arguments that stand before the name, or inside a string, wait for their end.

    Args:
        index: of the call in its choice.
        names: the tools that may be called, for objects that may also be just an answer in JSON: any other name, and
            any key that no call has, shows at once that it is no call. None takes any name.

    Attributes:
        text: what was read while the call was uncertain.
    """

    def __init__(self, index: int, names: Container[str] | None = None) -> None:
        self.progress = Progress.UNCERTAIN
        self.text = ""
        self._index = index
        self._names = names
        self._scanner = JsonScanner()
        self._key: str | None = None
        self._value: str | None = None  # the member being read, as it is written
        self._name: str | None = None
        self._arguments: str | None = None
        self._passes_on = False

    def feed(self, text: str) -> tuple[list[Part], str]:
        """Reads on: the parts that became certain, and the text behind the call if it is complete, broken or refused.

        The characters that refuse a call are part of ``text`` or, where it was never read, of the rest.
        """
        parts: list[Part] = []
        passed_on: list[str] = []
        for position, char in enumerate(text):
            try:
                self._take(char, parts, passed_on)
            except NotJsonError:
                self.progress = Progress.BROKEN if self.progress is Progress.BEGUN else Progress.REFUSED
                return self._with_arguments(parts, passed_on), text[position:]
            if self.progress is Progress.UNCERTAIN:
                self.text += char
            elif self.progress is Progress.COMPLETE:
                return self._with_arguments(parts, passed_on), text[position + 1 :]
        return self._with_arguments(parts, passed_on), ""

    def _with_arguments(self, parts: list[Part], passed_on: list[str]) -> list[Part]:
        return [*parts, CallArguments(self._index, "".join(passed_on))] if passed_on else parts

    def _take(self, char: str, parts: list[Part], passed_on: list[str]) -> None:
        scanner = self._scanner
        before, depth = scanner.state, scanner.depth
        scanner.push(char)
        if depth == 0 and scanner.state is not State.VALUE and char != "{":
            raise NotJsonError
        if depth == 1 and before is State.STRING and scanner.state is State.COLON:
            self._key = json.loads(scanner.key)
            if self._names is not None and self.progress is Progress.UNCERTAIN and self._key not in USUAL_KEYS:
                raise NotJsonError
        if depth == 1 and before is State.VALUE and scanner.state is not State.VALUE:
            self._begin_value(char, parts)
        self._take_value(char, before, depth, passed_on)
        if scanner.state is State.DONE:
            self._end(parts)

    def _begin_value(self, char: str, parts: list[Part]) -> None:
        self._value = ""
        is_first = self._arguments is None and self.progress is Progress.UNCERTAIN
        if self._key in _ARGUMENT_KEYS and self._name is not None and is_first and char == "{":
            self._begin(parts)
            self._passes_on = True

    def _take_value(self, char: str, before: State, depth: int, passed_on: list[str]) -> None:
        """Adds to the member being read, and ends it; the end of a number is noticed one character late."""
        if self._value is None:
            return
        scanner = self._scanner
        ends_before = depth == 1 and before is State.SCALAR and scanner.state is not State.SCALAR
        if not ends_before and self._passes_on:
            passed_on.append(char)
        elif not ends_before:
            self._value += char
        if ends_before or (scanner.depth == 1 and scanner.state is State.COMMA_OR_END):
            self._end_value(self._value)
            self._value = None
            self._passes_on = False

    def _end_value(self, value: str) -> None:
        if self.progress is not Progress.UNCERTAIN:
            return
        if self._key == "name" and self._name is None:
            self._name = _decoded_string(value)
            if not self._name or (self._names is not None and self._name not in self._names):
                raise NotJsonError
        elif self._key in _ARGUMENT_KEYS and self._arguments is None:
            self._arguments = _arguments_text(value)

    def _begin(self, parts: list[Part]) -> None:
        self.progress = Progress.BEGUN
        self.text = ""
        parts.append(new_call(self._index, self._name or ""))

    def _end(self, parts: list[Part]) -> None:
        if self.progress is Progress.UNCERTAIN:
            if self._name is None:
                raise NotJsonError
            self._begin(parts)
            parts.append(CallArguments(self._index, self._arguments or "{}"))
        self.progress = Progress.COMPLETE


def _arguments_text(value: str) -> str:
    """Arguments as JSON text: some models write them as a string that holds JSON, some write null for none."""
    if value == "null":
        return "{}"
    decoded = _decoded_string(value)
    if decoded is None:
        return value
    try:
        json.loads(decoded)
    except (ValueError, RecursionError):
        return value
    return decoded


def _decoded_string(value: str) -> str | None:
    """The text of a JSON string; None for any other JSON value, and for halves of surrogate pairs."""
    if not value.startswith('"'):
        return None
    text = json.loads(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        return None
    return text


class CallsReader:
    """What readers of answers with calls share: text that waits, and the call it stands in.

    Subclasses say in ``_step`` what to take off ``_pending`` next.
    """

    def __init__(self) -> None:
        self._pending = ""
        self._num_calls = 0
        self._call: CallReader | None = None

    @property
    def has_open_call(self) -> bool:
        """True while a call has begun and not ended."""
        return self._call is not None and self._call.progress in (Progress.BEGUN, Progress.BROKEN)

    def feed(self, text: str) -> list[Part]:
        """The parts that ``text`` makes certain."""
        parts: list[Part] = []
        self._pending += text
        while self._pending and self._step(parts):
            pass
        return parts

    def _step(self, parts: list[Part]) -> bool:
        """Takes something off the pending text; False if that needs more text."""
        raise NotImplementedError
