"""Owns the way from sampling parameters to what limits a sample's tokens: structured output, bad words, or both.

It must not know requests, steps or devices.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from jaxpage.errors import ParameterError, shown
from jaxpage.grammar.bad_words import BadWords
from jaxpage.grammar.compiler import CompiledGrammar, GrammarCompiler
from jaxpage.request import SamplingParams, StructuredOutputsParams, TokenConstraint
from jaxpage.tokenizer import Tokenizer


class ConstraintBuilder:
    """Makes constraints for one model. Callable from any thread; grammars are compiled once and kept."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._grammars = GrammarCompiler(tokenizer, vocab_size, end_token_ids)

    def check(self, params: SamplingParams) -> None:
        """Compiles what the parameters ask for.

        Raises:
            ParameterError: for a grammar that does not compile, a word without tokens, or fields that contradict each
                other.
        """
        if params.structured_outputs is not None:
            # Each of these could forbid all that the grammar allows, or the end.
            for name, neutral in (("ignore_eos", False), ("min_tokens", 0), ("allowed_token_ids", None)):
                if getattr(params, name) != neutral:
                    raise ParameterError(
                        name, f"cannot be combined with structured_outputs, got {shown(getattr(params, name))}"
                    )
            self._grammar(params.structured_outputs)
        for word in params.bad_words or ():
            if not self._tokenizer.encode(word, add_special_tokens=False):
                raise ParameterError("bad_words", f"the vocabulary has no tokens for {shown(word)}")

    def build(self, params: SamplingParams) -> TokenConstraint | None:
        """A constraint for one sample that begins; None if its tokens are free."""
        parts: list[TokenConstraint] = []
        if params.structured_outputs is not None:
            parts.append(self._grammar(params.structured_outputs).matcher())
        if params.bad_words:
            parts.append(BadWords(params.bad_words, self._ids_of, self._bytes_of))
        if len(parts) > 1:
            return AllOf(parts)
        return parts[0] if parts else None

    def _grammar(self, outputs: StructuredOutputsParams) -> CompiledGrammar:
        # Kept with the parameters: the engine's thread, which builds, must never wait for a compiler.
        if outputs.compiled is None or outputs.compiled[0] is not self:
            outputs.compiled = self, self._grammars.compile(outputs)
        return outputs.compiled[1]

    @functools.cached_property
    def _ids_of(self) -> dict[bytes, list[int]]:
        ids: dict[bytes, list[int]] = {}
        for token_id in range(min(self._tokenizer.vocab_size, self._vocab_size)):
            if piece := self._bytes_of(token_id):
                ids.setdefault(piece, []).append(token_id)
        return ids

    def _bytes_of(self, token_id: int) -> bytes:
        """What a token adds to the text; special ones add nothing to it."""
        is_text = token_id < self._tokenizer.vocab_size and token_id not in self._tokenizer.decoder.special_ids
        return self._tokenizer.token_bytes(token_id) if is_text else b""


class AllOf:
    """Several constraints at once. One that would leave nothing over is passed over for that step."""

    def __init__(self, parts: Sequence[TokenConstraint]) -> None:
        self._parts = list(parts)

    def mask(self, allowed: np.ndarray) -> None:
        """Clears the bits of all tokens that some part forbids, the first parts before the later ones."""
        for part in self._parts:
            before = allowed.copy()
            part.mask(allowed)
            if not allowed.any():
                allowed[:] = before

    def accept(self, token_id: int) -> None:
        """Moves every part on by one token."""
        for part in self._parts:
            part.accept(token_id)

    def fork(self) -> AllOf:
        """An independent constraint in the same state."""
        return AllOf([part.fork() for part in self._parts])
