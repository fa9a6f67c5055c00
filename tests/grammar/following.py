"""Following grammars token by token: what a mask allows, and whether a text can be written to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from jaxpage.grammar import CompiledGrammar, GrammarCompiler
from jaxpage.params import StructuredOutputsParams
from jaxpage.request import TokenConstraint

BYTES_END = 257


def grammar(compiler: GrammarCompiler, **wanted: Any) -> CompiledGrammar:
    """The grammar for ``StructuredOutputsParams(**wanted)``."""
    return compiler.compile(StructuredOutputsParams(**wanted))


def allowed(matcher: TokenConstraint, num_ids: int = 300) -> set[int]:
    """The ids that may come next."""
    words = np.full(-(-num_ids // 32), -1, np.int32)
    matcher.mask(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert not bits[num_ids:].any()
    return set(np.flatnonzero(bits[:num_ids]).tolist())


def may_write(compiled: CompiledGrammar, ids: Iterable[int], end: int = BYTES_END, num_ids: int = 300) -> bool:
    """Whether the masks let a sample write ``ids`` and then end."""
    matcher = compiled.matcher()
    words = np.empty(-(-num_ids // 32), np.int32)
    for token_id in (*ids, end):
        words[:] = -1
        matcher.mask(words)
        if not words[token_id >> 5] >> (token_id & 31) & 1:
            return False
        matcher.accept(token_id)
    return True


def writes(compiled: CompiledGrammar, text: str | bytes) -> bool:
    """``may_write`` for a text in the single bytes of the byte tokenizer."""
    return may_write(compiled, text.encode() if isinstance(text, str) else text)


def walk(
    compiled: CompiledGrammar,
    choose: Callable[[Sequence[int], int], int],
    max_tokens: int,
    end: int = BYTES_END,
    num_ids: int = 300,
) -> tuple[list[int], bool]:
    """The ids that ``choose(allowed ids, position)`` picks, and whether they come to an end."""
    matcher = compiled.matcher()
    ids: list[int] = []
    for position in range(max_tokens):
        token_id = choose(sorted(allowed(matcher, num_ids)), position)
        if token_id == end:
            return ids, True
        matcher.accept(token_id)
        ids.append(token_id)
    return ids, False
