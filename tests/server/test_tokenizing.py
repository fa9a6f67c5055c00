"""/tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

import pytest
from api_client import Api
from fake_engine import FakeEngine

pytestmark = pytest.mark.anyio


async def test_tokenize_text(api):
    answer = (await api.post("/tokenize", {"prompt": "abKLM☃", "return_token_strs": True, "model": "fake"})).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["tokens"][:2] == [286, 264]
    assert answer["token_strs"][:2] == ["ab", "KLM"]
    assert answer["max_model_len"] == 64
    empty = (await api.post("/tokenize", {"prompt": ""})).json()
    assert empty == {"count": 0, "max_model_len": 64, "tokens": [], "token_strs": None}


async def test_bos_1a_counts_agree(api, engine):
    for text in ("Hello world", "a<|end|>b", "☃ é"):
        count = (await api.post("/tokenize", {"prompt": text})).json()["count"]
        answer = await api.complete(prompt=text, echo=True, logprobs=0, return_token_ids=True, max_tokens=0)
        choice = answer["choices"][0]
        lengths = {answer["usage"]["prompt_tokens"], len(choice["prompt_token_ids"]), len(engine.seen[-1][0])}
        assert lengths | {len(choice["logprobs"]["tokens"])} == {count}
    for options in ({}, {"add_generation_prompt": False}, {"continue_final_message": True}):
        body = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]} | options
        tokens = (await api.post("/tokenize", body)).json()["tokens"]
        assert tokens == (await api.chat(**body, return_token_ids=True))["prompt_token_ids"]


async def test_tokenize_with_beginning_token(wordmark_tokenizer):
    api = Api(FakeEngine(wordmark_tokenizer))
    for special, first in ((None, 1), (True, 1), (False, 271)):
        tokens = (await api.post("/tokenize", {"prompt": "It", "add_special_tokens": special})).json()["tokens"]
        assert tokens[0] == first
    info = (await api.client.get("/tokenizer_info")).json()
    for name in ("bos_token", "eos_token"):
        tokens = (await api.post("/tokenize", {"prompt": info[name], "add_special_tokens": False})).json()["tokens"]
        assert tokens == [info[name + "_id"]]


async def test_tokenize_refusals(api):
    message = {"role": "user", "content": "Hi"}
    for body, parameter in [
        ({}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": "a", "messages": [message]}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [message], "tools": [{}]}, "tools.0.function"),
        ({"messages": [message], "chat_template": "x"}, "chat_template"),
        ({"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
        ({"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
    ]:
        await api.refused("/tokenize", body, parameter)
    await api.refused("/tokenize", {"prompt": "a", "model": "nope"}, "model", 404)
    await api.refused("/detokenize", {"tokens": [1], "model": "nope"}, "model", 404)


async def test_val_2a_detokenize(api):
    for tokens in ([-1], [294], [1099511627776], ["a"], [1.5], [True], None, 5, "5", {}):
        await api.refused("/detokenize", {"tokens": tokens}, "tokens")
    for tokens, text in [([], ""), ([256, 257, 258], "<|bos|><|eos|><|end|>"), ([261, 131.0], " ☃"), ([293], "\ufffd")]:
        assert (await api.post("/detokenize", {"tokens": tokens})).json() == {"prompt": text}


async def test_tokenizer_info(api, bytes_tokenizer):
    info = (await api.client.get("/tokenizer_info")).json()
    assert info["eos_token"] == "<|eos|>"
    assert info["chat_template"] == bytes_tokenizer.chat_template
    assert {"bos_token", "pad_token", "unk_token", "tokenizer_class"} < set(info)
