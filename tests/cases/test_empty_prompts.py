"""Cases EMP with a real vocabulary: the check is on ids, after tokenizing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
from api_client import Api
from asking import CHAT, COMPLETIONS, whole
from forced import ForcedModel

pytestmark = pytest.mark.anyio


@pytest.fixture
def smol(forced_model: Callable[..., ForcedModel]) -> ForcedModel:
    return forced_model("smol")


@pytest.fixture
async def smol_api(smol: ForcedModel) -> AsyncIterator[Api]:
    async with smol.serving() as api:
        yield api
        assert (await api.client.get("/health")).status_code == 200
        assert (await whole(api, COMPLETIONS, prompt="Hi"))[0].finish_reason == "stop"


async def test_emp_1a_text_that_tokenizes_to_nothing(smol: ForcedModel, smol_api: Api) -> None:
    for text in ("\u0004", "\u0004\u0006"):
        await smol_api.refused(COMPLETIONS, {"prompt": text}, "prompt")
        await smol_api.refused(COMPLETIONS, {"prompt": ["ok", text]}, "prompt")
    assert not smol.seen
    assert (await smol_api.complete(prompt="a\u0004b"))["usage"]["prompt_tokens"] == 2
    for text, ids in (("\u0004", []), ("\u0004\u0006", []), ("a\u0004b", [81, 82])):
        answer = (await smol_api.post("/tokenize", {"prompt": text})).json()
        assert (answer["count"], answer["tokens"]) == (len(ids), ids)


async def test_emp_1b_prompts_that_look_empty(smol_api: Api) -> None:
    for prompt in (" ", "\n", "\t", [[216]]):
        assert (await smol_api.complete(prompt=prompt))["usage"]["prompt_tokens"] == 1
    messages = [{"role": "user", "content": ""}]
    [answer] = await whole(smol_api, CHAT, messages=messages)
    tokenized = (await smol_api.post("/tokenize", {"messages": messages})).json()
    assert answer.usage["prompt_tokens"] == tokenized["count"] > 3


async def test_emp_1c_truncation_never_empties_a_prompt(smol_api: Api) -> None:
    ids = list(range(100, 700))
    body = {"prompt": ids, "return_token_ids": True, "max_tokens": 4, "ignore_eos": True}
    for limit in (0, 512, -2):
        for side in ("left", "right"):
            refused = body | {"truncate_prompt_tokens": limit, "truncation_side": side}
            await smol_api.refused(COMPLETIONS, refused, "truncate_prompt_tokens")
    for limit, kept in ((1, 1), (511, 511), (-1, 511)):
        for side, expected in (("left", ids[-kept:]), ("right", ids[:kept])):
            answer = await smol_api.complete(**body, truncate_prompt_tokens=limit, truncation_side=side)
            assert answer["choices"][0]["prompt_token_ids"] == expected
            assert answer["usage"]["completion_tokens"] == min(4, 512 - kept)
