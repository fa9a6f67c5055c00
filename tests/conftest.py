"""Fixtures shared by all tests: models, small engines."""

from __future__ import annotations

import atexit
import gc
import json
import logging
import os
import shutil
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy_reference
import pytest
from golden_data import DATA, TINY
from numpy_reference import RandomModel

from jaxpage.console import SERVER_LOGGERS

if TYPE_CHECKING:
    from jaxpage import LLM

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Threads of XLA on CPU, else as many as cores: JAX's GPU simulator blocks one for each warpgroup that waits, and hangs
# when none is left.
os.environ.setdefault("NPROC", str(max(8, os.cpu_count() or 1)))
# Compiled programs are shared within a run, and never with the user's cache. Set here and not in a fixture because jax
# reads it when it is imported; a developer who sets it keeps the programs from run to run.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jaxpage-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


MAX_LLMS = 8
"""Engines kept for tests to come."""


@pytest.fixture(scope="module", autouse=True)
def _few_programs() -> Iterator[None]:
    """Drops what a module's tests have compiled: programs are many small memory maps, and a process may have 65,530."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
        gc.collect()


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """Undoes what a command under test does to the log: its handler would write to a stream that is gone."""
    loggers = [logging.getLogger(name) for name in ("jaxpage", "opentelemetry", *SERVER_LOGGERS)]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


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


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RandomModel]:
    """Makes a two-layer Llama over the byte tokenizer of tests/data/tokenizers; keyword arguments change its config."""
    from safetensors.numpy import save_file

    base = json.loads((DATA / "tokenizers" / "fixtures.json").read_text(encoding="utf-8"))["tiny_model_config"]
    made: dict[str, RandomModel] = {}

    def make(**changes: Any) -> RandomModel:
        key = json.dumps(changes, sort_keys=True)
        if key not in made:
            config = base | changes
            tensors = numpy_reference.random_tensors(config)
            directory = tmp_path_factory.mktemp("random-model")
            shutil.copytree(DATA / "tokenizers" / "bytes_tokenizer", directory, dirs_exist_ok=True)
            (directory / "config.json").write_text(json.dumps(config))
            save_file(tensors, directory / "model.safetensors")
            made[key] = RandomModel(directory, config, tensors)
        return made[key]

    return make


@pytest.fixture(scope="session")
def llm_for() -> Callable[..., LLM]:
    """Gives an ``LLM`` over a directory, kept for a while for each set of options, and with an empty prefix cache.

    Step shapes are compiled when first met, since a test meets few of them.
    """
    from jaxpage import LLM

    built: OrderedDict[str, LLM] = OrderedDict()
    small = {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 16, "block_size": 4}
    small |= {"num_gpu_blocks_override": 128, "enforce_eager": True}

    def build(directory: Path, **options: Any) -> LLM:
        options = small | options
        key = f"{directory} {sorted(options.items())}"
        if key not in built:
            while len(built) >= MAX_LLMS:
                built.popitem(last=False)
            gc.collect()
            built[key] = LLM(model=str(directory), **options)
        built.move_to_end(key)
        llm = built[key]
        assert not llm.engine.has_work, "the last test left requests in the engine"
        llm.reset_prefix_cache()
        return llm

    return build


@pytest.fixture(scope="session")
def random_ids() -> Callable[..., list[int]]:
    """Draws token ids: a length and a seed give the same ones always."""

    def draw(length: int, seed: int = 0, vocab_size: int = 256) -> list[int]:
        return np.random.default_rng([seed, length]).integers(0, vocab_size, length).tolist()

    return draw
