"""Token ids, counts and request ids that clients send: the borders are served, what is beyond harms nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from api_client import Api, events, joined
from forced import ForcedModel

pytestmark = pytest.mark.anyio

COMPLETIONS = "/v1/completions"
ALL = set(range(294))
NEIGHBOUR: dict[str, Any] = {"prompt": [5, 6, 7], "temperature": 0.8, "seed": 3, "max_tokens": 24, "ignore_eos": True}
BAD_BIASES = [{"294": 1}, {"-1": 1}, {"abc": 1}, {"5.0": 1}, {"7": 100.5}, {"7": "x"}, {"7": None}]
BAD_IDS: list[Any] = [[294], [-1], [4294967296], ["5"], [5.5], [True], [[5]], 5]


def dice(prompt: list[int], output: list[int], sample: int) -> np.ndarray:
    """Logits as a model might have them."""
    return np.random.default_rng([*prompt, *output]).normal(0, 2, 294).astype(np.float32)


async def ids(api: Api, **body: Any) -> list[int]:
    return (await api.complete(**body, return_token_ids=True))["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    ("fields", "possible"),
    [
        ({"logit_bias": {}}, ALL),
        ({"logit_bias": {"293": -100}}, ALL - {293}),
        ({"logit_bias": {"97": 100}}, {97}),
        ({"logit_bias": {"0": 100, "293": 100}}, {0, 293}),
        ({"allowed_token_ids": [0, 293]}, {0, 293}),
        ({"allowed_token_ids": [293]}, {293}),
    ],
)
async def test_val_1_val_1a_val_1b_ids_reach_their_own_row_only(
    fields: dict[str, Any], possible: set[int], model: ForcedModel, api: Api
) -> None:
    model.scores(dice)
    alone = await ids(api, **NEIGHBOUR)
    beside, biased = await asyncio.gather(
        ids(api, **NEIGHBOUR), ids(api, **NEIGHBOUR | {"prompt": [9], "seed": 4} | fields)
    )
    assert beside == alone
    assert len(biased) == 24
    assert set(biased) <= possible


async def test_val_1_val_1a_refused_ones_leave_the_neighbour_alone(model: ForcedModel, api: Api) -> None:
    model.scores(dice)
    alone = await ids(api, **NEIGHBOUR)
    beside = asyncio.create_task(ids(api, **NEIGHBOUR))
    for field, values in [("logit_bias", BAD_BIASES), ("allowed_token_ids", BAD_IDS)]:
        for value in values:
            await api.refused(COMPLETIONS, {"prompt": "a", field: value}, field)
    await api.refused(COMPLETIONS, b'{"prompt": "a", "logit_bias": {"7": NaN}}', "logit_bias")
    assert await beside == alone
    assert await ids(api, **NEIGHBOUR) == alone


async def test_val_1b_the_last_id_in_every_place(model: ForcedModel, api: Api) -> None:
    model.says([293, 97])
    for prompt in ([0], [293]):
        response = await api.post(COMPLETIONS, {"prompt": prompt, "stream": True})
        assert joined(events(response.text)) == "\ufffda"
    answer = await api.complete(prompt=[0], stop_token_ids=[293], return_token_ids=True)
    assert (answer["choices"][0]["stop_reason"], answer["choices"][0]["token_ids"]) == (293, [293])
    # 293 and 162 spell the banned word, so 162 is out of the question after 293.
    model.says([293, 162, 97])
    assert (await api.complete(prompt=[0]))["choices"][0]["text"] == "\u6f22a"
    banned = await ids(api, prompt=[0], bad_words=["\u6f22"], temperature=0, max_tokens=3)
    assert banned[0] == 293
    assert banned[1] != 162


async def test_val_3_a_huge_n_is_refused_and_a_large_one_is_queued(forced_model: Callable[..., ForcedModel]) -> None:
    model = forced_model(num_gpu_blocks_override=64, max_model_len=128)
    model.says(lambda prompt, sample: [97 + sample % 26] * 4)
    async with model.serving() as api:
        for n in (1_000_000, 129, 0, -1, 1.5, "2"):
            await api.refused_at_once(COMPLETIONS, {"prompt": "Hi", "n": n, "max_tokens": 1}, "n")
            assert (await api.client.get("/health")).status_code == 200
        answer = await api.complete(prompt=[7] * 10, n=100, max_tokens=4)
        assert [choice["text"] for choice in answer["choices"]] == [4 * chr(97 + index % 26) for index in range(100)]
        model.scores(dice)
        answer = await api.complete(prompt=[7] * 10, n=4, temperature=0, max_tokens=8)
        assert len({choice["text"] for choice in answer["choices"]}) == 1


async def test_val_4_val_4b_equal_and_similar_request_ids_do_not_meet(model: ForcedModel, api: Api) -> None:
    model.says(lambda prompt, sample: [prompt[0] + sample] * 12)
    names = ["same", "same", "abc", "abc-0", "0_abc", "cmpl-abc"]

    async def texts(place: int, name: str, field: str) -> list[str]:
        body = {"prompt": [97 + 2 * place] * 3, "n": 2, "max_tokens": 12, "temperature": 0}
        body |= {"request_id": name} if field == "body" else {}
        response = await api.post(COMPLETIONS, body, headers={"X-Request-Id": name} if field == "header" else {})
        assert response.status_code == 200
        return [choice["text"] for choice in response.json()["choices"]]

    for field in ("body", "header"):
        answers = await asyncio.gather(*(texts(place, name, field) for place, name in enumerate(names)))
        assert answers == [[12 * chr(97 + 2 * place), 12 * chr(98 + 2 * place)] for place in range(len(names))]
    counts = model.llm.engine.metrics.read().counts
    assert (counts.num_running, counts.num_waiting) == (0, 0)
