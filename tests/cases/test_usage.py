"""Cases USE and STR over a real engine: what is counted, and how a stream is cut into chunks."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from api_client import Api, events, joined
from asking import CHAT, COMPLETIONS, PATHS, body_for, both_modes, streamed, whole
from forced import ForcedModel
from jsonschema import Draft202012Validator

pytestmark = pytest.mark.anyio
SCHEMAS = Path(__file__).parents[1] / "data" / "openai_openapi" / "response_schemas.json"
USAGES = {"include_usage": True, "continuous_usage_stats": True}
NASTY = 'a\nb\n\ndata: [DONE]\r\n\u2028\u2029\u0085\x00"\\'


@pytest.mark.parametrize("options", [USAGES, {"include_usage": True}])
async def test_use_1_steps_of_a_prefill_are_invisible(options: dict[str, bool], model: ForcedModel, api: Api) -> None:
    model.says([268])
    prompt = list(range(40))  # three steps of 16 tokens
    chunks = await api.stream(COMPLETIONS, prompt=prompt, max_tokens=1, stream_options=options)
    assert [joined([chunk]) for chunk in chunks] == ["Hel", ""]
    messages = [{"role": "user", "content": "x" * 40}]
    chat = await api.stream(CHAT, messages=messages, max_tokens=1, stream_options=options)
    assert [choice["delta"] for chunk in chat for choice in chunk["choices"]] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
    ]
    for each in (chunks, chat):
        usages = [chunk["usage"] for chunk in each if chunk.get("usage")]
        assert len(usages) == (len(each) if options is USAGES else 1)
        assert {usage["prompt_tokens"] for usage in usages} == {40 if each is chunks else 58}
        assert {usage["completion_tokens"] for usage in usages} <= {0, 1}
        assert usages[-1]["completion_tokens"] == 1


async def test_use_1b_cached_tokens_are_still_prompt_tokens(model: ForcedModel, api: Api) -> None:
    prompt, cached = list(range(40)), []
    for ids, length in ((prompt, 40), (prompt, 40), (prompt[:20], 20)):
        usage = (await api.complete(prompt=ids))["usage"]
        assert usage["prompt_tokens"] == length
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 39, 19]


async def test_use_1c_the_ending_token_is_one_number_everywhere(model: ForcedModel, api: Api) -> None:
    async def generated() -> float:
        text = (await api.client.get("/metrics")).text
        return sum(map(float, re.findall(r"^jaxpage:generation_tokens_total(?:\{.*\})? (\S+)$", text, re.MULTILINE)))

    model.says([97, 98, 257])
    for limit, count in ((None, 3), (3, 3), (2, 2)):
        for path, logprobs in ((COMPLETIONS, 0), (CHAT, True)):
            for ask in (whole, streamed):
                before = await generated()
                [answer] = await ask(api, path, max_tokens=limit, logprobs=logprobs)
                assert answer.usage["completion_tokens"] == len(answer.token_ids) == count
                assert len(answer.logprobs["tokens" if path == COMPLETIONS else "content"]) == count
                assert await generated() - before == count


async def test_str_1_the_index_names_the_choice(model: ForcedModel, api: Api) -> None:
    model.says(lambda prompt, sample: [prompt[-1] if prompt[-1] < 256 else 97] * (2 + 3 * sample))
    for n in (1, 3):
        answers = await both_modes(api, CHAT, n=n)
        assert [len(each.token_ids) for each in answers] == [3 + 3 * sample for sample in range(n)]
    answers = await both_modes(api, COMPLETIONS, prompt=["a", "b"], n=2)
    assert [each.text for each in answers] == ["aa", "aaaaa", "bb", "bbbbb"]


async def test_str_1a_envelopes_of_eight_streams_at_once(model: ForcedModel, api: Api) -> None:
    model.says(list(b"some words"))
    definitions = json.loads(SCHEMAS.read_text(encoding="utf-8"))
    names = {COMPLETIONS: "CreateCompletionStreamChunk", CHAT: "CreateChatCompletionStreamResponse"}
    given = [None if place % 2 else f"mine-{place}" for place in range(8)]

    async def stream(place: int) -> tuple[str, list[dict[str, Any]]]:
        path, name = PATHS[place // 4], given[place]
        headers = {"X-Request-Id": name} if name else {}
        response = await api.post(path, body_for(path, stream=True), headers=headers)
        return path, events(response.text)

    ids = set()
    for place, (path, chunks) in enumerate(await asyncio.gather(*map(stream, range(8)))):
        envelopes = {(chunk["id"], chunk["object"], chunk["created"], chunk["model"]) for chunk in chunks}
        [(name, kind, _, _)] = envelopes
        assert (given[place] or "") in name
        assert kind == ("text_completion" if path == COMPLETIONS else "chat.completion.chunk")
        ids.add(name)
        validator = Draft202012Validator(definitions | {"$ref": f"#/$defs/{names[path]}"})
        for chunk in chunks:
            validator.validate(chunk)
    assert len(ids) == 8


async def test_str_1b_frames_survive_any_text(model: ForcedModel, api: Api) -> None:
    model.says([*NASTY.encode(), 257])
    for path in PATHS:
        [answer] = await both_modes(api, path, max_tokens=40)
        assert answer.text == NASTY
    http_client: Any = httpx.AsyncClient(transport=httpx.ASGITransport(api.app))
    async with openai.AsyncOpenAI(api_key="none", base_url="http://test/v1", http_client=http_client) as client:
        name = (await client.models.list()).data[0].id
        stream = await client.completions.create(model=name, prompt="x", max_tokens=40, temperature=0, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == NASTY


async def test_str_1c_order_of_choices_in_a_whole_answer(model: ForcedModel, api: Api) -> None:
    model.says(lambda prompt, sample: [97 + sample] * (9, 2, 5)[sample])
    for path in PATHS:
        answers = await both_modes(api, path, n=3)
        assert [each.text for each in answers] == ["a" * 9, "b" * 2, "c" * 5]
    answer = await api.complete(prompt=["x", "y"], n=3)
    assert [choice["text"] for choice in answer["choices"]] == ["a" * 9, "b" * 2, "c" * 5] * 2
