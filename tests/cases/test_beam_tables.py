"""Cases BEAM in a real engine: beams over known probabilities."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from api_client import Api
from driving import Ask, run
from forced import IMPOSSIBLE, ForcedModel, Rule

from jaxpage import BeamSearchParams, RequestOutput

pytestmark = pytest.mark.anyio
LETTERS = "abcd"
TABLE = {
    "": [0.5, 0.4, 0.06, 0.04],
    "a": [0.28, 0.26, 0.24, 0.22],
    "b": [0.02, 0.03, 0.05, 0.90],
    "c": [0.70, 0.12, 0.10, 0.08],
    "d": [0.05, 0.05, 0.85, 0.05],
}
PERMUTED = str.maketrans("abcd", "cadb")


def table_rule(prompt: list[int], output: list[int], sample: int) -> np.ndarray:
    """The table by the last letter; for prompts that end in "P" with its letters permuted."""
    logits = np.full(294, IMPOSSIBLE, np.float32)
    is_permuted = prompt[-1] == ord("P")
    for last, row in TABLE.items():
        if (last.translate(PERMUTED) if is_permuted else last) == "".join(map(chr, output[-1:])):
            for letter, probability in zip(LETTERS, row, strict=True):
                logits[ord(letter.translate(PERMUTED) if is_permuted else letter)] = math.log(probability)
    return logits


def search(prompt: Sequence[int], width: int, **params: Any) -> Ask:
    return Ask(list(prompt), BeamSearchParams(beam_width=width, **({"max_tokens": 4, "ignore_eos": True} | params)))


def scores_of(output: RequestOutput) -> dict[str, float]:
    return {beam.text: beam.cumulative_logprob or 0.0 for beam in output.outputs}


BEST = {"bdca": -1.541, "abdc": -2.308, "bdcb": -3.304}


@pytest.mark.parametrize(
    ("width", "expected"), [(1, {"aaaa": -4.512}), (2, {"bdca": -1.541, "bdcb": -3.304}), (3, BEST)]
)
def test_beam_1_hand_made_table(width: int, expected: dict[str, float], model: ForcedModel) -> None:
    model.scores(table_rule)
    plain, permuted = run(model.llm, [search(b"x", width), search(b"P", width)])
    assert list(scores_of(plain)) == list(expected)
    assert scores_of(plain) == pytest.approx(expected, abs=1e-3)
    assert list(scores_of(permuted)) == [text.translate(PERMUTED) for text in expected]
    assert list(scores_of(permuted).values()) == pytest.approx(list(expected.values()), abs=1e-3)


def test_beam_1_a_width_of_64_is_exhaustive(forced_model: Callable[..., ForcedModel]) -> None:
    model = forced_model(
        max_num_seqs=64, max_num_batched_tokens=64, max_logprobs=70, num_gpu_blocks_override=400, max_model_len=128
    )
    model.scores(table_rule)

    def value(text: str) -> float:
        return sum(math.log(TABLE[last][LETTERS.index(letter)]) for last, letter in zip(["", *text], text))  # noqa: B905

    every = sorted(map("".join, itertools.product(LETTERS, repeat=4)), key=value, reverse=True)
    found = scores_of(run(model.llm, [search(b"x", 64)])[0])
    assert list(found)[:3] == ["bdca", "abdc", "adca"]
    assert found["adca"] == pytest.approx(-2.727, abs=1e-3)
    assert set(found) <= set(every)
    for text, score in found.items():
        assert score == pytest.approx(value(text), abs=1e-3)
    # After three letters all 64 beginnings are there, so nothing good was missed.
    assert list(found.values()) == pytest.approx([value(text) for text in every[:64]], abs=1e-3)


async def test_beam_1_and_1a_over_http(model: ForcedModel, api: Api) -> None:
    model.scores(table_rule)
    body: dict[str, Any] = {"use_beam_search": True, "n": 3, "max_tokens": 4, "ignore_eos": True, "logprobs": 0}
    answer = await api.complete(prompt=["x", "P"], **body)
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [*BEST, *(text.translate(PERMUTED) for text in BEST)]
    sums = [sum(choice["logprobs"]["token_logprobs"]) for choice in answer["choices"]]
    assert sums == pytest.approx([*BEST.values()] * 2, abs=1e-3)


def test_beam_1a_width_1_is_greedy(model: ForcedModel) -> None:
    def rule(prompt: list[int], output: list[int], sample: int) -> np.ndarray:
        return np.random.default_rng([*prompt, *output]).standard_normal(294).astype(np.float32)

    model.scores(rule)
    prompt, greedy = [120, 5], []
    for _ in range(10):
        greedy.append(int(rule(prompt, greedy, 0).argmax()))
    [beam] = run(model.llm, [search(prompt, 1, max_tokens=10)])[0].outputs
    assert beam.token_ids == greedy


def ending_rule() -> Rule:
    """Start: a .6, end .4; after a: a .45, end .55."""
    rows = [{97: 0.6, 257: 0.4}, {97: 0.45, 257: 0.55}]

    def rule(prompt: list[int], output: list[int], sample: int) -> np.ndarray:
        assert 257 not in output, "an ended beam was extended"
        logits = np.full(294, IMPOSSIBLE, np.float32)
        for token_id, probability in rows[bool(output)].items():
            logits[token_id] = math.log(probability)
        return logits

    return rule


@pytest.mark.parametrize(
    ("length_penalty", "best", "score"),
    [(0, [257], -0.916), (1, [97, 257], -1.109 / 2), (2, [97, 97, 257], -1.907 / 9)],
)
async def test_beam_1b_ended_beams_and_length_penalty(
    length_penalty: float, best: list[int], score: float, model: ForcedModel
) -> None:
    model.scores(ending_rule())
    params = {"max_tokens": 3, "ignore_eos": False, "length_penalty": length_penalty}
    output = run(model.llm, [search(b"x", 2, **params)])[0]
    assert output.outputs[0].token_ids == best
    assert output.outputs[0].score == pytest.approx(score, abs=1e-3)
    async with model.serving() as api:
        body = {"prompt": "x", "use_beam_search": True, "n": 2, "return_token_ids": True} | params
        assert (await api.complete(**body))["choices"][0]["token_ids"] == best
