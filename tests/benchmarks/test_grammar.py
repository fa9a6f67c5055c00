"""The benchmark of structured output, on a tokenizer that needs no download."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxpage.benchmarks.grammar import CASES, row
from jaxpage.grammar import GrammarCompiler
from jaxpage.tokenizer import Tokenizer


@pytest.mark.parametrize("name", CASES)
def test_every_text_is_what_its_grammar_says(name: str) -> None:
    tokenizer = Tokenizer.from_directory(Path(__file__).parents[1] / "data" / "tokenizers" / "bytes_tokenizer")
    figures = row(name, GrammarCompiler(tokenizer, tokenizer.vocab_size, [257]), tokenizer, rounds=2)
    assert figures["grammar"] == name
    assert all(value > 0 for key, value in figures.items() if key != "grammar")
