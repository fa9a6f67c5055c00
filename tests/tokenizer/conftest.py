"""Tokenizers that the tests of this folder share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxpage.tokenizer import Tokenizer

DATA = Path(__file__).parent.parent / "data"


@pytest.fixture(scope="session")
def fixtures() -> dict[str, Any]:
    return json.loads((DATA / "tokenizers" / "fixtures.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def bytes_tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(DATA / "tokenizers" / "bytes_tokenizer")


@pytest.fixture(scope="session")
def wordmark() -> Tokenizer:
    return Tokenizer.from_directory(DATA / "tokenizers" / "wordmark_tokenizer")


@pytest.fixture(scope="session")
def gguf_tokenizer(builtin_gguf: Callable[[str], Path]) -> Callable[[str], Tokenizer]:
    """Builds the tokenizer of a built-in GGUF file, once a session."""
    built: dict[str, Tokenizer] = {}

    def build(name: str) -> Tokenizer:
        if name not in built:
            built[name] = Tokenizer.from_gguf(_tokenizer_metadata(builtin_gguf(name)))
        return built[name]

    return build


def _tokenizer_metadata(path: Path) -> dict[str, Any]:
    import gguf

    fields = gguf.GGUFReader(path).fields
    return {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")}
