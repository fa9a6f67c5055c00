"""Owns the growing text of one output sequence: whole characters, stop strings, and what may be shown already.

Must not know of requests, HTTP or finish reasons: token ids go in, text comes out.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from jaxpage.tokenizer.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns the token ids of one output sequence into text, and finds stop strings in it.

    All text together is decode(prompt + output) without the leading decode(prompt). A token costs the same at every
    position: state is at most three bytes of a character and the text that could still grow into a stop string.

    A stop string is looked for in generated text only. The token whose text completes it ends the search; of several
    completed by one token the one that starts first wins, and of those that start together the first in `stop`. Until
    `min_tokens` tokens exist nothing is looked for; later a match may begin in earlier text but must end in later text.

    Attributes:
        token_offsets: for each generated token the number of characters of (uncut) text before it. Never falls.
            Its length is the number of tokens consumed, which ends with the token that completed a stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        """Starts behind a prompt.

        Args:
            tokenizer: gives the bytes of tokens.
            prompt_token_ids: left context; no text of it is ever returned.
            stop: stop strings, none empty.
            min_tokens: number of tokens before stop strings are looked for.
            include_stop_str_in_output: whether the text ends behind the stop string instead of before it.
            skip_special_tokens: whether special tokens render as nothing.
            spaces_between_special_tokens: part of the API because clients send it. No blanks are added for either
                value: decoding adds nothing to what tokens say, as Hugging Face's fast tokenizers do.

        Raises:
            ValueError: a stop string is empty.
        """
        if "" in stop:
            raise ValueError(f"stop: must not hold an empty string, got {str(list(stop))[:200]}")
        self.token_offsets: list[int] = []
        self._decoder = tokenizer.decoder
        self._hidden: frozenset[int] = self._decoder.special_ids if skip_special_tokens else frozenset()
        self._characters = codecs.getincrementaldecoder("utf-8")(self._decoder.errors)
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._include_stop = include_stop_str_in_output
        self._num_chars = 0
        self._num_unsearched_chars = 0
        self._held = ""
        self._shown: list[str] = []
        self._delta: list[str] = []
        self._ended = False
        self._known_marks = 0
        self._drops_blank = self._decoder.strips_first_blank
        self._read_prompt(prompt_token_ids)

    def _read_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        """Takes over the half character at the prompt's end, and whether text has begun."""
        tail = b""
        for token_id in reversed(prompt_token_ids):
            if token_id not in self._hidden:
                tail = self._decoder.token_bytes(token_id) + tail
            if len(tail) > 3:  # no unfinished character is longer, and any decoder is in step again behind a whole one
                break
        if tail:
            self._drops_blank = False
        self._characters.decode(tail)
        pending = self._characters.getstate()[0]
        self._known_marks = len(pending.decode("utf-8", self._decoder.errors))

    @property
    def text(self) -> str:
        """All text that may be shown so far: cut at a stop string, without what is still held back."""
        if len(self._shown) > 1:
            self._shown = ["".join(self._shown)]
        return self._shown[0] if self._shown else ""

    def append(self, token_ids: Sequence[int], *, suppress_last_text: bool = False) -> str | None:
        """Takes the next tokens, as many as there are at once.

        Args:
            token_ids: the ids; those behind the one that completes a stop string are left alone.
            suppress_last_text: whether the last id ends the output and renders as nothing.

        Returns:
            The stop string that was found, or None. After one the sequence is over.
        """
        assert not self._ended, "tokens after the end of a sequence"
        num_rendered = len(token_ids) - 1 if suppress_last_text else len(token_ids)
        for index, token_id in enumerate(token_ids):
            self.token_offsets.append(self._num_chars)
            if index >= num_rendered or token_id in self._hidden:
                continue
            text = self._next_text(self._decoder.token_bytes(token_id))
            if text and (found := self._add(text)) is not None:
                return found
        return None

    def _next_text(self, data: bytes, final: bool = False) -> str:
        """Returns the characters that `data` completes."""
        text = self._characters.decode(data, final)
        if text and self._known_marks:
            # The prompt's text already ends in these marks; a character completed by the output replaces them.
            for _ in range(self._known_marks):
                text = text.removeprefix("\ufffd")
            self._known_marks = 0
        if text and self._drops_blank:
            text = text.removeprefix(" ")
            self._drops_blank = False
        return text

    def _add(self, text: str) -> str | None:
        self._num_chars += len(text)
        if not self._stop:
            self._show(text)
            return None
        window = self._held + text
        if len(self.token_offsets) > self._min_tokens:
            begin, found = self._find_stop(window)
            if found is not None:
                self._held = ""
                self._ended = True
                self._show(window[: begin + len(found) if self._include_stop else begin])
                return found
        else:
            self._num_unsearched_chars = self._num_chars
        kept = len(window) - self._held_length(window)
        self._held = window[kept:]
        self._show(window[:kept])
        return None

    def _find_stop(self, window: str) -> tuple[int, str | None]:
        """Returns begin and text of the match that counts. `window` is the end of all text.

        Nothing before the window can be part of a match: it would have been held back.
        """
        searched_from = self._num_unsearched_chars - (self._num_chars - len(window))
        best, found = len(window), None
        for stop in self._stop:
            begin = window.find(stop, max(0, searched_from - len(stop) + 1))
            if 0 <= begin < best:
                best, found = begin, stop
        return best, found

    def _held_length(self, window: str) -> int:
        """Returns the length of the longest end of `window` that begins a stop string without completing it."""
        longest = 0
        for stop in self._stop:
            for begin in range(max(0, len(window) - len(stop) + 1), len(window) - longest):
                if stop.startswith(window[begin:]):
                    longest = len(window) - begin
                    break
        return longest

    def _show(self, text: str) -> None:
        if text:
            self._shown.append(text)
            self._delta.append(text)

    def take_delta(self) -> str:
        """Returns the text that became showable since the last call."""
        delta = "".join(self._delta)
        self._delta.clear()
        return delta

    def finish(self) -> None:
        """Ends the sequence: text held back becomes final, bytes of a half character become U+FFFD."""
        if self._ended:
            return
        self._ended = True
        rest = self._next_text(b"", final=True)
        self._num_chars += len(rest)
        self._show(self._held + rest)
        self._held = ""
