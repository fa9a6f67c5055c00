"""Owns the step from a token id to the bytes it stands for, and from bytes to text.

Must not know of requests, stop strings or prompts: it looks at one tokenizer and at plain ids.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import tokenizers

REPLACEMENT: Final = "\ufffd"
ONE_MARK_PER_BYTE: Final = "jaxpage-one-mark-per-byte"
_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _mark_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(ONE_MARK_PER_BYTE, _mark_each_byte)


def byte_alphabet() -> dict[str, int]:
    """Returns the 256 printable characters that byte-level BPE (GPT-2) writes for bytes, each with its byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(hidden)})
    return alphabet


class TokenDecoder:
    """Bytes of single tokens, and text of token lists, read off a tokenizer's decoder.

    Decoding is: join the bytes of all visible tokens, decode them as UTF-8, drop one blank at the very start if the
    tokenizer hides word starts in marks. Bytes that form no character become U+FFFD: one per truncated character for
    byte-level alphabets (as Rust and Python do), one per byte for byte fallback (as SentencePiece does; characters
    that are whole stay whole even next to stray bytes). Blanks are never tidied.

    Attributes:
        errors: name of the codec error handler that writes U+FFFD.
        strips_first_blank: whether one blank at the very start of a decoded text is dropped.
        special_ids: ids that `skip_special_tokens` hides.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Reads the decoder of `backend`.

        Raises:
            ValueError: the decoder is of a kind whose tokens have no bytes of their own (WordPiece, CTC, ...).
        """
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._cache: dict[int, bytes] = {}
        self._alphabet: dict[str, int] | None = None
        self._byte_fallback = False
        self._replacements: list[tuple[str, str]] = []
        self._separator = ""
        self.strips_first_blank = False
        self._read(_decoder_of(backend))
        self.errors: str = ONE_MARK_PER_BYTE if self._byte_fallback else "replace"

    def _read(self, decoder: Mapping[str, Any] | None) -> None:
        if decoder is None:
            # A tokenizer without a decoder writes its tokens side by side with blanks between.
            self._separator, self.strips_first_blank = " ", True
            return
        fused = False
        for step in decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]:
            kind = step["type"]
            if kind == "ByteLevel":
                self._alphabet = byte_alphabet()
            elif kind == "ByteFallback":
                self._byte_fallback = True
            elif kind == "Fuse":
                fused = True
            elif kind == "Replace" and "String" in step["pattern"]:
                self._replacements.append((step["pattern"]["String"], step["content"]))
            elif kind == "Metaspace":
                self._replacements.append((step["replacement"], " "))
                self.strips_first_blank = step.get("prepend_scheme", "always") != "never"
            elif kind == "Strip" and fused and step["content"] == " " and (step["start"], step["stop"]) == (1, 0):
                self.strips_first_blank = True
            else:
                raise ValueError(f"tokenizer: decoder step {str(step)[:200]} is not supported")

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token; empty for an id that the tokenizer does not use."""
        piece = self._cache.get(token_id)
        if piece is None:
            piece = self._cache[token_id] = self._compute(token_id)
        return piece

    def _compute(self, token_id: int) -> bytes:
        if token_id < 0:
            raise ValueError(f"token_id: must not be negative, got {token_id}")
        added = self._added.get(token_id)
        if added is not None and (token_id in self.special_ids or self._alphabet is not None):
            return (self._separator + added).encode()
        token = added if added is not None else self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._alphabet is not None:
            if all(char in self._alphabet for char in token):
                return bytes(self._alphabet[char] for char in token)
            return token.encode()
        if self._byte_fallback and (match := _BYTE_PIECE.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in self._replacements:
            token = token.replace(old, new)
        return (self._separator + token).encode()

    def token_text(self, token_id: int) -> str:
        """Returns the text of one token as in the middle of a text, U+FFFD for parts of characters."""
        if token_id in self.special_ids:
            return self._added[token_id]
        return self.token_bytes(token_id).decode("utf-8", self.errors)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Returns the text of `ids` from the beginning of a text on."""
        hidden = self.special_ids if skip_special_tokens else frozenset()
        text = b"".join([self.token_bytes(i) for i in ids if i not in hidden]).decode("utf-8", self.errors)
        return text[1:] if self.strips_first_blank and text.startswith(" ") else text


def _decoder_of(backend: tokenizers.Tokenizer) -> Mapping[str, Any] | None:
    """Returns the decoder's JSON; its own state is exactly that, while the whole tokenizer's is many megabytes."""
    decoder = backend.decoder
    return None if decoder is None else json.loads(decoder.__getstate__())
