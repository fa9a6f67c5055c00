"""Streams: frames, envelopes, usage, intervals and errors after the status line."""

from __future__ import annotations

import json

import pytest
from api_client import events, joined

pytestmark = pytest.mark.anyio
PATHS = pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
BODY = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}
NASTY = 'a\nb\n\ndata: [DONE]\r\n\u2028\u2029\u0085\x00"\\\x7f\x1b'


@PATHS
async def test_str_1b_frames_survive_any_text(api, engine, path):
    engine.script = lambda prompt, sample: [*NASTY.encode(), 257]
    response = await api.post(path, BODY | {"stream": True, "max_tokens": 60 - 20})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert joined(events(response.text)) == NASTY
    assert response.content.isascii()
    for lines in (response.text.split("\n"), response.text.splitlines()):
        filled = [line for line in lines if line]
        assert filled[-1] == "data: [DONE]"
        for line in filled[:-1]:
            assert isinstance(json.loads(line.removeprefix("data: ")), dict)
            assert line.isprintable()


@PATHS
async def test_str_1a_envelope_is_constant_and_distinct(api, path):
    seen = set()
    for given in (None, "mine-1", None, "mine-2"):
        response = await api.post(path, BODY | {"stream": True}, headers={"X-Request-Id": given} if given else {})
        envelopes = {(c["id"], c["object"], c["created"], c["model"]) for c in events(response.text)}
        assert len(envelopes) == 1
        (envelope,) = envelopes
        assert all(list(chunk)[:4] == ["id", "object", "created", "model"] for chunk in events(response.text))
        assert response.headers["x-request-id"] in envelope[0]
        assert given is None or given in envelope[0]
        seen.add(envelope[0])
    assert len(seen) == 4


async def test_str_1_index_of_prompts_and_samples(api, engine):
    engine.script = lambda prompt, sample: [prompt[0]] * (1 + 3 * sample + (prompt[0] - 97))
    body = {"prompt": ["a", "b"], "n": 2}
    whole = await api.complete(**body)
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in whole["choices"]] == ["a", "aaaa", "bb", "bbbbb"]
    chunks = await api.stream("/v1/completions", **body)
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    assert [joined(chunks, index) for index in range(4)] == [c["text"] for c in whole["choices"]]


async def test_str_1c_choices_are_sorted(api, engine):
    engine.script = lambda prompt, sample: [97 + sample] * (9, 2, 5)[sample]
    for answer in (await api.complete(prompt="Hi", n=3), await api.complete(prompt=["x", "y"], n=3)):
        assert [c["index"] for c in answer["choices"]] == list(range(len(answer["choices"])))
        assert [c["text"] for c in answer["choices"][:3]] == ["a" * 9, "b" * 2, "c" * 5]


@PATHS
async def test_use_1a_running_usage(api, engine, path):
    engine.script = lambda prompt, sample: [97] * 12
    engine.cached_tokens = 1
    chunks = await api.stream(path, **BODY, stream_options={"include_usage": True, "continuous_usage_stats": True})
    usages = [chunk["usage"] for chunk in chunks]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    assert usages[-1] == usages[-2]
    assert counts[-1] == 13
    for usage in usages:
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 1}
    for options in ({"continuous_usage_stats": True}, {}, None):
        chunks = await api.stream(path, **BODY, stream_options=options)
        assert not any("usage" in chunk for chunk in chunks)
        assert all(chunk["choices"] for chunk in chunks)


@PATHS
async def test_use_1_chunks_are_tokens(api, path):
    chunks = await api.stream(path, **BODY, max_tokens=1, stream_options={"include_usage": True})
    assert len(chunks) == 2 + ("chat" in path)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 1
    assert all("usage" not in chunk for chunk in chunks[:-1])


@PATHS
async def test_use_1c_ending_token_is_counted_the_same(api, engine, path):
    engine.script = lambda prompt, sample: [97, 98, 257]
    for limit, count in ((None, 3), (3, 3), (2, 2)):
        whole = (await api.post(path, BODY | {"max_tokens": limit})).json()
        chunks = await api.stream(path, **BODY, max_tokens=limit, stream_options={"include_usage": True})
        assert whole["usage"]["completion_tokens"] == chunks[-1]["usage"]["completion_tokens"] == count


async def test_use_1b_cached_tokens_add_up_over_prompts(api, engine):
    engine.cached_tokens = 2
    usage = (await api.complete(prompt=["abcdef", "ghijk"], n=2))["usage"]
    lengths = sum(len(ids) for ids, _, _ in engine.seen)
    assert usage["prompt_tokens"] == lengths
    assert usage["prompt_tokens_details"]["cached_tokens"] == 4


@PATHS
async def test_stream_interval(api, engine, path):
    engine.script = lambda prompt, sample: [97] * 10
    body = BODY | {"logprobs": 0} if "chat" not in path else BODY | {"logprobs": True}
    chunks = await api.stream(path, **body, stream_interval=4, return_token_ids=True)
    pieces = [c for chunk in chunks for c in chunk["choices"] if c.get("token_ids")]
    assert [len(piece["token_ids"]) for piece in pieces] == [1, 4, 4, 2]
    assert joined(chunks) == "a" * 10
    key = "tokens" if "chat" not in path else "content"
    assert sum(len(piece["logprobs"][key]) for piece in pieces) == 11


@PATHS
@pytest.mark.parametrize("prompts", [1, 2])
async def test_faults_after_the_status_line_travel_in_the_stream(api, engine, path, prompts):
    engine.fail_after = 2
    body = BODY | {"prompt": ["Hi"] * prompts}
    chunks = await api.stream(path, **body)
    assert chunks[-1]["error"] | {"message": ""} == {
        "message": "",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
    assert "secret" not in json.dumps(chunks)
    response = await api.post(path, body)
    assert response.status_code == 500
    assert "secret" not in response.text
    assert not engine.running
    engine.fail_after = None
    assert (await api.post(path, BODY)).status_code == 200


@PATHS
async def test_a_dead_engine_is_503(api, engine, path):
    engine.is_dead = True
    for stream in (False, True):
        response = await api.post(path, BODY | {"stream": stream})
        assert response.status_code == 503
        assert response.json()["error"]["type"] == "ServiceUnavailableError"
    assert (await api.client.get("/health")).status_code == 503
