"""A prompt is tokenized once: every place that counts its tokens says the same number."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable

import pytest
from api_client import TOKENIZERS, Api
from forced import ForcedModel

pytestmark = pytest.mark.anyio

WITH_BOS = json.loads((TOKENIZERS / "fixtures.json").read_text(encoding="utf-8"))["templates"]["with_bos"]
TEXTS = [
    "It",
    "Hello world",
    "end.",
    " It is",
    "LLMs ",
    "a\nb\t",
    "\u00e9 \u6f22 \u2603",
    "\U0001f600",
    "<s>It",
    "<|im_end|>",
]
CHATS = [
    [{"role": "user", "content": "It"}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": "Hi"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "\u6f22"}],
    [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]}],
    [{"role": "user", "content": "<s>It<|im_end|>"}],
]


@pytest.fixture(params=["wordmark", "smol"])
async def api(request: pytest.FixtureRequest, forced_model: Callable[..., ForcedModel]) -> AsyncIterator[Api]:
    """A server over WORDMARK, whose template here writes its own beginning token, or SMOL."""
    model = forced_model(request.param)
    options = {"chat_template": WITH_BOS} if request.param == "wordmark" else {}
    async with model.serving(**options) as api:
        yield api


async def prompt_tokens(api: Api) -> float:
    """Those that the metrics have counted so far."""
    page = (await api.client.get("/metrics")).text
    [value] = re.findall(r"^jaxpage:prompt_tokens_total\S* (\S+)$", page, re.MULTILINE)
    return float(value)


@pytest.mark.parametrize("text", TEXTS)
async def test_bos_1a_counts_of_a_text_agree_everywhere(api: Api, text: str) -> None:
    before = await prompt_tokens(api)
    tokens = (await api.post("/tokenize", {"prompt": text})).json()
    assert await prompt_tokens(api) == before
    answer = await api.complete(prompt=text, echo=True, logprobs=0, return_token_ids=True, max_tokens=1)
    choice = answer["choices"][0]
    assert choice["prompt_token_ids"] == tokens["tokens"]
    assert len(choice["logprobs"]["tokens"]) == tokens["count"] + 1
    assert answer["usage"]["prompt_tokens"] == tokens["count"] == len(tokens["tokens"])
    assert await prompt_tokens(api) - before == tokens["count"]


@pytest.mark.parametrize("messages", CHATS, ids=range(len(CHATS)))
async def test_bos_1a_counts_of_a_chat_agree_everywhere(api: Api, messages: list[dict[str, object]]) -> None:
    before = await prompt_tokens(api)
    tokens = (await api.post("/tokenize", {"messages": messages})).json()
    answer = await api.chat(messages=messages, return_token_ids=True, prompt_logprobs=0, max_tokens=1)
    assert answer["prompt_token_ids"] == tokens["tokens"]
    assert len(answer["prompt_logprobs"]) == tokens["count"]
    assert answer["usage"]["prompt_tokens"] == tokens["count"] == len(tokens["tokens"])
    assert await prompt_tokens(api) - before == tokens["count"]


async def test_bos_1b_continuing_a_message_with_a_real_template(forced_model: Callable[..., ForcedModel]) -> None:
    model = forced_model("smol")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Sure, "}]

    async def prompt(**flags: bool) -> str:
        answer = await api.chat(messages=messages, return_token_ids=True, max_tokens=1, **flags)
        return model.llm.engine.tokenizer.decode(answer["prompt_token_ids"])

    async with model.serving() as api:
        begun = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nSure, "
        assert (await prompt(continue_final_message=True, add_generation_prompt=False)).endswith(begun)
        assert (await prompt(add_generation_prompt=False)).endswith(begun + "<|im_end|>\n")
        both = {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
        await api.refused("/v1/chat/completions", both, "continue_final_message")
