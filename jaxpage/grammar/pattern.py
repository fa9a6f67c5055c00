r"""Owns the step from a JSON Schema ``pattern`` (ECMA-262, in Unicode mode) to llguidance's regex dialect (Rust's).

It must not know schemas. The two dialects spell some things alike and mean different ones: ``.``, ``\s``, ``\d``,
``[[]``, ``\<``. Characters that the JSON we generate cannot hold (see ``WRITABLE``) are taken out of every class, so
that what is left of a pattern is what a model can really write, and an empty rest is noticed while compiling.
"""

from __future__ import annotations

import re
from typing import Final

WRITABLE: Final = r"\x08-\x0a\x0c\x0d\x20-\x7e\x80-\x{10ffff}"
r"""Inside of a class: characters that generated strings can hold. They have no ``\u`` escapes, so of the control
characters only those with a letter of their own remain."""

_NOTHING: Final = r"[^\s\S]"
_DOT: Final = rf"[[^\n\r\x{{2028}}\x{{2029}}]&&[{WRITABLE}]]"
_SETS: Final = {
    "d": "0-9",
    "w": "0-9A-Z_a-z",
    "s": r"\t\n\x0c\r\x20\xa0\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}",
}
_LETTERS: Final = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_QUANTIFIER: Final = re.compile(r"[*+?]\??|\{\d+(?:,\d*)?\}\??")
_GROUP: Final = re.compile(r"\((?:\?:|\?<[A-Za-z_$][\w$]*>)?(?!\?)")
_HEX: Final = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}")
_PROPERTY: Final = re.compile(r"[pP]\{[A-Za-z0-9_=]+\}")


class PatternError(ValueError):
    """The pattern is malformed, or asks for something a grammar cannot say; the message is one line."""


def is_writable(code: int) -> bool:
    """Whether generated strings can hold the character; the same set as ``WRITABLE``."""
    return code in (8, 9, 10, 12, 13) or 0x20 <= code <= 0x7E or code >= 0x80


def translated(pattern: str) -> str:
    """``pattern`` in Rust's dialect, still unanchored.

    Raises:
        PatternError: for what neither dialect, or only ECMA's, can say: look-around, backreferences, word boundaries.
    """
    return _Translator(pattern).translate()


class _Translator:
    """Reads a pattern from left to right; nesting is left to the compiler of the result."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0

    def translate(self) -> str:
        pieces: list[str] = []
        while self._at < len(self._text):
            pieces.append(self._piece())
        return "".join(pieces)

    def _piece(self) -> str:
        if match := _QUANTIFIER.match(self._text, self._at):
            self._at = match.end()
            return match[0]
        character = self._text[self._at]
        if character == "(":
            match = _GROUP.match(self._text, self._at)
            if match is None:
                raise PatternError("look-around and flags inside of a pattern are not supported")
            self._at = match.end()
            return "(?:"
        self._at += 1
        if character in "^$|)":
            return character
        if character == ".":
            return _DOT
        if character == "[":
            return self._class()
        if character != "\\":
            return _literal(ord(character))
        atom = self._escape(in_class=False)
        if isinstance(atom, int):
            return _literal(atom)
        return f"[[{atom}]&&[{WRITABLE}]]"

    def _class(self) -> str:
        is_negated = self._text.startswith("^", self._at)
        self._at += is_negated
        members: list[str] = []
        is_plain = True  # no member outside of WRITABLE
        while not self._text.startswith("]", self._at):
            low = self._member()
            if not self._text.startswith("-", self._at) or self._text.startswith("-]", self._at):
                members.append(low if isinstance(low, str) else _code(low))
                is_plain &= isinstance(low, int) and is_writable(low)
                continue
            self._at += 1
            high = self._member()
            if not isinstance(low, int) or not isinstance(high, int) or low > high:
                raise PatternError("a character class has a range that is none")
            members.append(f"{_code(low)}-{_code(high)}")
            is_plain &= low >= 0x80 or (low >= 0x20 and high <= 0x7E)
        self._at += 1
        if is_negated:
            return f"[[^{''.join(members)}]&&[{WRITABLE}]]" if members else f"[{WRITABLE}]"
        if not members:
            return _NOTHING
        return f"[{''.join(members)}]" if is_plain else f"[[{''.join(members)}]&&[{WRITABLE}]]"

    def _member(self) -> int | str:
        if self._at >= len(self._text):
            raise PatternError("a character class is not closed")
        self._at += 1
        character = self._text[self._at - 1]
        return self._escape(in_class=True) if character == "\\" else ord(character)

    def _escape(self, in_class: bool) -> int | str:
        """What an escape stands for: a character, or the inside of a class."""
        character = self._text[self._at : self._at + 1]
        if not character:
            raise PatternError("ends in a backslash")
        if match := _HEX.match(self._text, self._at):
            return self._hexadecimal(match)
        if match := _PROPERTY.match(self._text, self._at):
            self._at = match.end()
            return "\\" + match[0]
        self._at += 1
        if character in _LETTERS:
            return _LETTERS[character]
        if character in _SETS:
            return _SETS[character]
        if character.lower() in _SETS:
            return f"[^{_SETS[character.lower()]}]"
        if character == "b" and in_class:
            return 8
        if character == "0" and not self._text[self._at : self._at + 1].isdigit():
            return 0
        letter = self._text[self._at : self._at + 1]
        if character == "c" and letter.isascii() and letter.isalpha():
            self._at += 1
            return ord(letter) % 32
        if character.isalnum() or character == "_":
            kind = {"b": "word boundaries are", "B": "word boundaries are", "k": "backreferences are"}
            what = "backreferences are" if character.isdigit() else kind.get(character, f"the escape \\{character} is")
            raise PatternError(f"{what} not supported")
        return ord(character)

    def _hexadecimal(self, match: re.Match[str]) -> int:
        self._at = match.end()
        code = int(match[1] or match[2] or match[3], 16)
        if 0xD800 <= code < 0xDC00 and self._text.startswith("\\", self._at):
            low = _HEX.match(self._text, self._at + 1)
            if low is not None and low[2] and 0xDC00 <= int(low[2], 16) < 0xE000:
                self._at = low.end()
                return 0x10000 + ((code - 0xD800) << 10) + int(low[2], 16) - 0xDC00
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise PatternError(f"U+{code:04X} is no character")
        return code


def _code(code: int) -> str:
    """A character inside of a class, where most punctuation means something in Rust's dialect."""
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\x{{{code:x}}}"


def _literal(code: int) -> str:
    """A character outside of classes."""
    if not is_writable(code):
        return _NOTHING
    return chr(code) if chr(code).isalnum() else f"\\x{{{code:x}}}"
