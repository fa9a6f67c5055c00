"""A tiny engine and its scrapes; the drivers of engine tests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.append(str(Path(__file__).parents[1] / "engine"))

if TYPE_CHECKING:
    from numpy_reference import RandomModel
    from scrapes import Scrape

    from jaxpage import LLM


@pytest.fixture
def tiny(random_model: Callable[..., RandomModel], llm_for: Callable[..., LLM]) -> LLM:
    """Blocks of 16 tokens, 64 tokens a step, room to swap."""
    return llm_for(
        random_model().directory,
        block_size=16,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=33,
        swap_space=0.01,
        preemption_mode="swap",
    )


@pytest.fixture
def scrape() -> Callable[[LLM], Scrape]:
    """Reads an engine's page as the server shows it."""
    from scrapes import Scrape

    from jaxpage.metrics import ServerMetrics
    from jaxpage.metrics.prometheus import Exporter

    return lambda llm: Scrape(Exporter("tiny", [llm.engine.metrics], ServerMetrics()).text())
