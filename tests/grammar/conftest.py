"""Compilers that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import hypothesis_profiles  # noqa: F401
import pytest

from jaxpage.grammar import GrammarCompiler
from jaxpage.tokenizer import Tokenizer

TOKENIZERS = Path(__file__).parents[1] / "data" / "tokenizers"


@pytest.fixture(scope="session")
def bytes_tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(TOKENIZERS / "bytes_tokenizer")


@pytest.fixture(scope="session")
def compiler(bytes_tokenizer: Tokenizer) -> GrammarCompiler:
    """For a model with six more ids than its tokenizer knows."""
    return GrammarCompiler(bytes_tokenizer, 300, [257])


@pytest.fixture(scope="session")
def smol(builtin_gguf: Callable[[str], Path]) -> tuple[Tokenizer, GrammarCompiler]:
    """SmolLM2's tokenizer and a compiler for it; end id 2."""
    from jaxpage.weights import open_checkpoint

    tokenizer = open_checkpoint(builtin_gguf("smollm2-135m-instruct")).load_tokenizer()
    return tokenizer, GrammarCompiler(tokenizer, tokenizer.vocab_size, [2])
