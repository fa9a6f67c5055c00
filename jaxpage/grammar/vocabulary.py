"""Owns how a model's tokens look to llguidance: their bytes, which of them are special, and which end a text.

It must not know grammars.
"""

from __future__ import annotations

from collections.abc import Sequence

import llguidance

from jaxpage.tokenizer import Tokenizer


class _Vocabulary:
    """What ``llguidance.TokenizerWrapper`` asks of a tokenizer.

    Tokens without bytes are never allowed by a grammar; so ids beyond the tokenizer's vocabulary are forbidden. Special
    tokens are no text: a grammar may only name them.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        known = min(tokenizer.vocab_size, vocab_size)
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(known)] + [b""] * (vocab_size - known)
        self.eos_token_id = end_token_ids[0]
        # An end token ends the text even where a tokenizer thinks of it as plain text.
        self.special_token_ids = sorted({*tokenizer.decoder.special_ids, *end_token_ids} & set(range(vocab_size)))
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def build(tokenizer: Tokenizer, vocab_size: int, end_token_ids: Sequence[int]) -> llguidance.LLTokenizer:
    """llguidance's view of the model's vocabulary; takes about a second for 100,000 tokens."""
    wrapper = llguidance.TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, end_token_ids))
    return llguidance.LLTokenizer(wrapper, n_vocab=vocab_size, eos_token=list(end_token_ids))
