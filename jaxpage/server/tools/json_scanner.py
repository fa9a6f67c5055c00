"""Owns following a JSON text character by character: where it stands, and whether it is still JSON.

It must not know what the text means.
"""

from __future__ import annotations

import enum
import re

_BLANKS = " \t\n\r"
_SCALAR_STARTS = "-0123456789tfn"
_SCALAR = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?|true|false|null", re.ASCII)
_SCALAR_CHARACTERS = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzE")
_LONGEST_SCALAR = 400


class NotJsonError(ValueError):
    """The text is no start of any JSON value."""


class State(enum.Enum):
    """What may come next."""

    VALUE = enum.auto()
    VALUE_OR_END = enum.auto()
    KEY = enum.auto()
    KEY_OR_END = enum.auto()
    COLON = enum.auto()
    COMMA_OR_END = enum.auto()
    STRING = enum.auto()
    ESCAPE = enum.auto()
    HEX = enum.auto()
    SCALAR = enum.auto()
    DONE = enum.auto()


class JsonScanner:
    """Follows one JSON value.

    Attributes:
        state: what may come next. SCALAR: within a number or a word, which only the character after it ends.
        in_key: the string being read is a key.
        key: the key read last, as it is written, quotes included.
    """

    def __init__(self) -> None:
        self.state = State.VALUE
        self.in_key = False
        self.key = ""
        self._open: list[str] = []
        self._scalar = ""
        self._num_hex = 0

    @property
    def depth(self) -> int:
        """Objects and arrays that are open."""
        return len(self._open)

    def push(self, char: str) -> None:
        """Takes the next character.

        Raises:
            NotJsonError: it cannot stand here.
        """
        state = self.state
        if self.in_key:
            self.key += char
        if state is State.STRING:
            self._string(char)
        elif state is State.ESCAPE:
            self._escape(char)
        elif state is State.HEX:
            _require(char in "0123456789abcdefABCDEF")
            self._num_hex += 1
            self.state = State.STRING if self._num_hex == 4 else State.HEX
        elif state is State.SCALAR:
            self._continue_scalar(char)
        elif char not in _BLANKS:
            self._structure(state, char)

    def _structure(self, state: State, char: str) -> None:
        is_end = state in (State.VALUE_OR_END, State.KEY_OR_END, State.COMMA_OR_END)
        if is_end and char in "]}":
            _require((self._open.pop() == "{") == (char == "}"))
            self._end_value()
        elif state in (State.VALUE, State.VALUE_OR_END):
            self._start_value(char)
        elif state in (State.KEY, State.KEY_OR_END):
            _require(char == '"')
            self.state, self.in_key, self.key = State.STRING, True, char
        elif state is State.COLON:
            _require(char == ":")
            self.state = State.VALUE
        else:
            _require(state is State.COMMA_OR_END and char == ",")
            self.state = State.KEY if self._open[-1] == "{" else State.VALUE

    def _start_value(self, char: str) -> None:
        if char in "{[":
            self._open.append(char)
            self.state = State.KEY_OR_END if char == "{" else State.VALUE_OR_END
        elif char == '"':
            self.state, self.in_key = State.STRING, False
        else:
            _require(char in _SCALAR_STARTS)
            self.state, self._scalar = State.SCALAR, char

    def _end_value(self) -> None:
        self.state = State.COMMA_OR_END if self._open else State.DONE

    def _string(self, char: str) -> None:
        if char == '"':
            if self.in_key:
                self.state, self.in_key = State.COLON, False
            else:
                self._end_value()
        elif char == "\\":
            self.state = State.ESCAPE
        else:
            _require(char >= " ")

    def _escape(self, char: str) -> None:
        _require(char in '"\\/bfnrtu')
        self._num_hex = 0
        self.state = State.HEX if char == "u" else State.STRING

    def _continue_scalar(self, char: str) -> None:
        if char in _SCALAR_CHARACTERS:
            self._scalar += char
            _require(len(self._scalar) <= _LONGEST_SCALAR)
        else:
            _require(_SCALAR.fullmatch(self._scalar) is not None)
            self._end_value()
            self.push(char)


def _require(fine: bool) -> None:
    if not fine:
        raise NotJsonError
