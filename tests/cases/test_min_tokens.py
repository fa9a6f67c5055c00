"""Cases MIN: end ids are masked until min_tokens, row by row."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from api_client import Api
from asking import PATHS, all_ways, body_for
from driving import Ask, abort_after, ask, ids_of, run
from forced import BEST, ForcedModel, Rule

pytestmark = pytest.mark.anyio
END, A = 257, 97


def ending_at(position: int) -> Rule:
    """The end id is the best from this output position on, 97 the second; before, 97 is the best."""
    return lambda prompt, output, sample: {A: 10.0, END: BEST if len(output) >= position else 0.0}


enforced = pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"min_tokens": 8}, [A] * 8 + [END]),
        ({"ignore_eos": True, "max_tokens": 8}, [A, A] + [END] * 6),
        ({"ignore_eos": True, "min_tokens": 8, "max_tokens": 8}, [A] * 8),
    ],
)


@enforced
async def test_min_1_min_tokens_and_ignore_eos_are_enforced(
    body: dict[str, Any], expected: list[int], model: ForcedModel, api: Api
) -> None:
    model.scores(ending_at(2))
    [answer] = await all_ways(api, **body)
    assert answer.token_ids == expected
    assert answer.finish_reason == ("length" if "max_tokens" in body else "stop")


@enforced
def test_min_1_neighbours_end_where_they_want(body: dict[str, Any], expected: list[int], model: ForcedModel) -> None:
    model.scores(ending_at(2))
    plain = {"max_tokens": 16, "ignore_eos": False}
    neighbours = [ask([120, place], **plain) for place in range(2)]
    outputs = run(model.llm, [neighbours[0], ask([121], **(plain | body)), neighbours[1]])
    assert [ids_of(output) for output in outputs] == [[[A, A, END]], [expected], [[A, A, END]]]


@pytest.mark.parametrize(
    ("min_tokens", "max_tokens", "expected"), [(6, 6, [A] * 6), (6, 7, [A] * 6 + [END]), (0, 7, [END])]
)
async def test_min_1b_the_mask_lifts_exactly_at_min_tokens(
    min_tokens: int, max_tokens: int, expected: list[int], model: ForcedModel, api: Api
) -> None:
    model.scores(ending_at(0))
    [answer] = await all_ways(api, min_tokens=min_tokens, max_tokens=max_tokens)
    assert answer.token_ids == expected
    assert answer.finish_reason == ("stop" if expected[-1] == END else "length")


@pytest.mark.parametrize("path", PATHS)
async def test_min_1b_wrong_values_are_refused(path: str, model: ForcedModel, api: Api) -> None:
    for min_tokens in (7, -1, 2.5):
        await api.refused(path, body_for(path, min_tokens=min_tokens, max_tokens=6), "min_tokens")
    assert not model.seen


@pytest.mark.parametrize("rows", [(1, 3, 5, 7), (0, 2, 4, 6), (0, 1, 2, 3)])
def test_min_1c_masks_stay_in_their_row(rows: tuple[int, ...], model: ForcedModel) -> None:
    model.scores(ending_at(1))
    asks = [ask([120, row], max_tokens=12, ignore_eos=False, min_tokens=8 if row in rows else 0) for row in range(8)]
    expected = [[A] * 8 + [END] if row in rows else [A, END] for row in range(8)]
    assert [ids_of(output)[0] for output in run(model.llm, asks)] == expected
    for gone in itertools.combinations(rows, 2):
        aborted = abort_after(dict.fromkeys(gone, 3))
        outputs = run(model.llm, asks, aborted)
        for row, output in enumerate(outputs):
            if row in gone:
                assert output.outputs[0].finish_reason == "abort"
                assert 1 <= len(ids_of(output)[0]) <= 3
            else:
                assert ids_of(output) == [expected[row]]


def test_min_1c_whoever_comes_late_is_masked_by_its_own_count(model: ForcedModel) -> None:
    model.scores(ending_at(0))
    asks: list[Ask] = [
        ask([120, place], arrives_at=2 * place, min_tokens=place, max_tokens=9, ignore_eos=False) for place in range(8)
    ]
    assert [ids_of(output)[0] for output in run(model.llm, asks)] == [[A] * place + [END] for place in range(8)]
