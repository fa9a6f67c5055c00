"""A mixture of experts in the engine: its greedy output does not depend on what else the engine does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from driving import Ask, ask, ids_of, poison, preempt_at, run
from golden_data import TINY

if TYPE_CHECKING:
    from jaxpage import LLM

NUM_NEW = 12


@pytest.fixture
def llm(tiny_model_dir: Callable[[str], Path], llm_for: Callable[..., LLM]) -> LLM:
    return llm_for(tiny_model_dir("mixtral"))


@pytest.fixture(scope="module")
def greedy() -> list[tuple[Ask, list[int]]]:
    """Prompts of 1, 17 and 90 tokens, the last in chunks of 16, with Hugging Face's answers."""
    golden = np.load(TINY / "mixtral" / "golden.npz")
    return [
        (ask(golden[f"prompt_{index}"].tolist(), max_tokens=NUM_NEW), golden[f"greedy_{index}"][:NUM_NEW].tolist())
        for index in range(3)
    ]


def test_alone(llm: LLM, greedy: list[tuple[Ask, list[int]]]) -> None:
    for each, expected in greedy:
        assert ids_of(run(llm, [each])[0]) == [expected]


def test_among_others_with_poison_in_unused_blocks(
    llm: LLM, greedy: list[tuple[Ask, list[int]]], random_ids: Callable[..., list[int]]
) -> None:
    others = [ask(random_ids(3 + 7 * index), max_tokens=5 + index, temperature=1.0) for index in range(4)]
    outputs = run(llm, [each for each, _ in greedy] + others, poison(float("nan")))
    assert [ids_of(output) for output in outputs[:3]] == [[expected] for _, expected in greedy]


def test_preempted(llm: LLM, greedy: list[tuple[Ask, list[int]]]) -> None:
    each, expected = greedy[1]
    hook = preempt_at(16, 20)
    assert ids_of(run(llm, [each], hook)[0]) == [expected]
    assert not hook.left  # type: ignore[attr-defined]
