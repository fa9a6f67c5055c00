"""POST /v1/embeddings: shapes of input, the vectors, and what is refused."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from api_client import Api

PATH = "/v1/embeddings"
pytestmark = pytest.mark.anyio


async def embed(api: Api, **body: object) -> dict:
    response = await api.post(PATH, body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(
    ("value", "prompts"),
    [
        ("qz", [[113, 122]]),
        (["a", "bc"], [[97], [98, 99]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
async def test_the_four_shapes_of_input(api, engine, value, prompts):
    answer = await embed(api, input=value, user="someone", normalize=False)
    assert sorted(ids for ids, _, _ in engine.pooled) == sorted(prompts)
    assert answer["object"] == "list" and answer["model"] == "fake"
    count = sum(map(len, prompts))
    assert answer["usage"] == {
        "prompt_tokens": count,
        "total_tokens": count,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    for index, (item, ids) in enumerate(zip(answer["data"], prompts, strict=True)):
        assert item == {"object": "embedding", "index": index, "embedding": [ids[-1], 1, 1, 1]}


async def test_pooling_length_and_dimensions(engine):
    api = Api(engine, pooling="mean")
    (item,) = (await embed(api, input=[97, 99], normalize=False))["data"]
    assert item["embedding"] == [98, 1, 1, 1]
    (item,) = (await embed(api, input=[97, 99], normalize=False, pooling="last", dimensions=2))["data"]
    assert item["embedding"] == [99, 1]
    (item,) = (await embed(api, input=[97, 99]))["data"]
    assert np.linalg.norm(item["embedding"]) == pytest.approx(1)


async def test_base64_holds_the_same_numbers(api):
    (plain,) = (await embed(api, input="ab", encoding_format="float"))["data"]
    (packed,) = (await embed(api, input="ab", encoding_format="base64"))["data"]
    np.testing.assert_array_equal(
        np.frombuffer(base64.b64decode(packed["embedding"]), "<f4"), np.float32(plain["embedding"])
    )


async def test_a_prompt_may_be_as_long_as_the_model_and_longer_ones_can_be_cut(api, engine):
    assert (await embed(api, input="x" * 64))["usage"]["prompt_tokens"] == 64
    await embed(api, input="x" * 65 + "yz", truncate_prompt_tokens=-1)
    assert len(engine.pooled[-1][0]) == 64
    await embed(api, input="qzvk", truncate_prompt_tokens=2)
    assert engine.pooled[-1][0] == [118, 107]
    await embed(api, input="qzvk", truncate_prompt_tokens=2, truncation_side="right", cache_salt="s")
    assert engine.pooled[-1][0] == [113, 122] and engine.pooled[-1][2] == "s"


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [97, "a"]}, "input"),
        ({"input": [[97], "a"]}, "input"),
        ({"input": [294]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [True]}, "input"),
        ({"input": "x" * 65}, "input"),
        ({"input": [97] * 65}, "input"),
        ({"input": ["a"] * 1025}, "input"),
        ({"input": "x" * 1_000_000}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 5}, "dimensions"),
        ({"input": "a", "dimensions": 1.5}, "dimensions"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": "a", "normalize": "yes"}, "normalize"),
        ({"input": "a", "truncate_prompt_tokens": 65}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "truncation_side": "both"}, "truncation_side"),
        ({"input": "a", "priority": 3}, "priority"),
        ({"input": "a", "cache_salt": ""}, "cache_salt"),
        ({"input": "a", "user": 5}, "user"),
        ({"input": "a", "add_special_tokens": 1}, "add_special_tokens"),
    ],
)
async def test_val_2_bad_fields_are_refused_before_the_engine_sees_them(api, engine, body, parameter):
    await api.refused(PATH, body, parameter)
    assert not engine.pooled


async def test_index_of_the_bad_input_is_named(api):
    assert "input[1]" in await api.refused(PATH, {"input": ["a", "x" * 65]}, "input")


async def test_other_names_keys_and_a_dead_engine(engine):
    api = Api(engine, api_key=("k",))
    assert (await api.post(PATH, {"input": "a"})).status_code == 401
    headers = {"Authorization": "Bearer k"}
    response = await api.post(PATH, {"input": "a", "model": "other"}, headers=headers)
    assert (response.status_code, response.json()["error"]["param"]) == (404, "model")
    engine.is_dead = True
    assert (await api.post(PATH, {"input": "a"}, headers=headers)).status_code == 503
