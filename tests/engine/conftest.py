"""Fixtures of several engines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.append(str(Path(__file__).parents[1] / "server"))

from replicas import SMALL, wait_for

if TYPE_CHECKING:
    from numpy_reference import RandomModel

    from jaxpage import LLM, AsyncLLMEngine


@pytest.fixture(scope="module")
def replica_directory(random_model: Callable[..., RandomModel]) -> Path:
    return random_model().directory


@pytest.fixture(scope="module")
def many(replica_directory: Path) -> Iterator[LLM]:
    """Two engines in processes; ``many.engine`` is their ``AsyncLLMEngine``."""
    from jaxpage import LLM

    llm = LLM(model=str(replica_directory), data_parallel_size=2, data_parallel_backend="process", **SMALL)
    yield llm
    llm.engine.shutdown()


@pytest.fixture
def engine(many: LLM) -> AsyncLLMEngine:
    """Both engines live and are idle."""
    wait_for(lambda: not any(each.is_dead for each in many.engine.group.engines), 60)
    many.reset_prefix_cache()
    return many.engine


@pytest.fixture
def one(llm_for: Callable[..., LLM], replica_directory: Path) -> LLM:
    return llm_for(replica_directory, **SMALL)
