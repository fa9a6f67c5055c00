"""Owns ``bad_words``: which tokens would complete a banned word, given the tokens so far.

It must not know requests, or how a mask reaches the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

Bits = np.ndarray
"""int32 words [ceil(vocab_size / 32)]; bit i % 32 of word i // 32 stands for token i."""


def forbid(allowed: Bits, token_ids: Iterable[int]) -> None:
    """Clears the bits of ``token_ids``."""
    words = allowed.view(np.uint32)
    for token_id in token_ids:
        words[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))


class BadWords:
    """Follows a sample's tokens and masks those that would complete a banned word.

    A word is banned in every way in which whole tokens can spell it, as it stands and after a blank. Only generated
    tokens count: a word may begin in the prompt and end in the answer.
    """

    def __init__(
        self, words: Sequence[str], ids_of: Mapping[bytes, Sequence[int]], bytes_of: Callable[[int], bytes]
    ) -> None:
        """
        Args:
            words: not empty strings.
            ids_of: the tokens that stand for some bytes.
            bytes_of: the bytes a token stands for; b"" for those without any.
        """
        forms = {form for word in words for form in (word, " " + word.removeprefix(" "))[: 2 - word.startswith(" ")]}
        self._forms = tuple(sorted(form.encode() for form in forms))
        self._ids_of, self._bytes_of = ids_of, bytes_of
        self._whole = [token_id for form in self._forms for token_id in ids_of.get(form, ())]
        self._begun: frozenset[bytes] = frozenset()
        """What is still missing of the forms that the last tokens have begun."""

    def mask(self, allowed: Bits) -> None:
        """Clears the bits of all tokens that would complete a word."""
        forbid(allowed, self._whole)
        for rest in self._begun:
            forbid(allowed, self._ids_of.get(rest, ()))

    def accept(self, token_id: int) -> None:
        """Moves on by one token."""
        piece = self._bytes_of(token_id)
        if not piece:  # a special token is no text, so a word can go on after it
            return
        self._begun = frozenset(
            form[len(piece) :]
            for form in (*self._forms, *self._begun)
            if form.startswith(piece) and len(form) > len(piece)
        )

    def fork(self) -> BadWords:
        """An independent follower in the same state."""
        other = object.__new__(BadWords)
        other.__dict__.update(self.__dict__)
        return other
