"""Owns the way from sampling parameters to what limits a sample's tokens: structured output or bad words.

It must not know requests, steps or devices.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from jaxpage.errors import ConflictError, ParameterError, shown
from jaxpage.grammar.bad_words import BadWords
from jaxpage.grammar.compiler import CompiledGrammar, GrammarCompiler
from jaxpage.params import SamplingParams, StructuredOutputsParams
from jaxpage.request import TokenConstraint
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
            neutrals = {"ignore_eos": False, "min_tokens": 0, "allowed_token_ids": None, "bad_words": []}
            for name, neutral in neutrals.items():
                if getattr(params, name) != neutral:
                    raise ConflictError(name, getattr(params, name), "structured_outputs")
            self._grammar(params.structured_outputs)
        for word in params.bad_words or ():
            if not self._tokenizer.encode(word, add_special_tokens=False):
                raise ParameterError("bad_words", f"the vocabulary has no tokens for {shown(word)}")

    def build(self, params: SamplingParams) -> TokenConstraint | None:
        """A constraint for one sample that begins; None if its tokens are free."""
        if params.structured_outputs is not None:
            return self._grammar(params.structured_outputs).matcher()
        if params.bad_words:
            return BadWords(params.bad_words, self._ids_of, self._bytes_of)
        return None

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
