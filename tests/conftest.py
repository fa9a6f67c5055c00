"""Fixtures shared by all tests: models, small engines."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"
TINY = DATA / "golden" / "tiny"
TINY_FAMILIES = (
    "llama",
    "llama3_rope_tied",
    "llama_bias_headdim",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma3_text",
)

os.environ.setdefault("JAX_PLATFORMS", "cpu")


@pytest.fixture(scope="session")
def builtin_gguf() -> Callable[[str], Path]:
    """Gives the GGUF file of a built-in model, fetched once into the cache."""
    from jaxpage.weights.builtin import fetch

    return fetch


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a complete Hugging Face directory of a tiny family: config, weights, byte-level tokenizer."""

    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            directory = tmp_path_factory.mktemp("models") / family
            shutil.copytree(TINY / family, directory, ignore=shutil.ignore_patterns("golden.npz", "*.md", "*.legacy.*"))
            for file in (TINY / "byte_tokenizer").iterdir():
                shutil.copy(file, directory / file.name)
            made[family] = directory
        return made[family]

    return make


@pytest.fixture(scope="session", autouse=True)
def own_compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiled test programs are shared within a run, and never with the user's cache."""
    previous = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(tmp_path_factory.mktemp("xla"))
    yield
    if previous is None:
        del os.environ["JAX_COMPILATION_CACHE_DIR"]
    else:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = previous
