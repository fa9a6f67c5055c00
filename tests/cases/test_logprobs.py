"""Cases LOG: values, names and bytes of tokens, from known logits to both endpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from api_client import Api
from asking import CHAT, COMPLETIONS, both_modes, whole
from forced import ForcedModel, Rule

pytestmark = pytest.mark.anyio


def ranked(*ids: int) -> dict[int, float]:
    """Logits of which each is one below the one before; everything else is 0."""
    return {token_id: 20.0 - place for place, token_id in enumerate(ids)}


def drawn_from(ids: np.ndarray, vocab_size: int) -> Rule:
    """Only ``ids`` can come, other ones the likeliest after each history."""

    def rule(prompt: list[int], output: list[int], sample: int) -> np.ndarray:
        logits = np.full(vocab_size, -1e9, np.float32)
        logits[ids] = np.random.default_rng([*prompt, 7, *output]).standard_normal(len(ids))
        return logits

    return rule


async def test_log_2_alternatives_that_are_parts_of_characters(model: ForcedModel, api: Api) -> None:
    forced = [ranked(261), ranked(131, 240, 128, 274), ranked(98)]
    model.scores(lambda prompt, output, sample: forced[len(output)])
    [answer] = await both_modes(api, CHAT, max_tokens=3, logprobs=True, top_logprobs=4)
    content = answer.logprobs["content"]
    chosen = [entry["bytes"] for entry in content]
    assert chosen == [[32, 226, 152], [131], [98]]
    assert b"".join(map(bytes, chosen)).decode() == answer.text == " ☃b"
    top = content[1]["top_logprobs"]
    assert [entry["bytes"] for entry in top] == [[131], [240], [128], [32, 119, 111, 114, 108, 100]]
    assert top[3]["token"] == " world"
    assert [round(top[0]["logprob"] - entry["logprob"], 3) for entry in top] == [0, 1, 2, 3]


async def test_log_2a_different_ids_with_the_same_string(model: ForcedModel, api: Api) -> None:
    model.scores(ranked(131, 128, 240, 97, 98))
    body: dict[str, Any] = {"max_tokens": 1, "logprobs": 5}
    [first] = await both_modes(api, COMPLETIONS, **body)
    [value], [top] = first.logprobs["token_logprobs"], first.logprobs["top_logprobs"]
    assert first.token_ids == [131]
    assert top["\ufffd"] == value
    [second] = await both_modes(api, COMPLETIONS, **body, logit_bias={"128": 50})
    assert second.token_ids == [128]
    [chosen], [again] = second.logprobs["token_logprobs"], second.logprobs["top_logprobs"]
    assert chosen == pytest.approx(value - 1, abs=1e-4)
    assert again == top  # the values are the model's: no bias is in them
    assert max(again.values()) == again["\ufffd"] == value
    for bias in ({}, {"128": 50}):
        [third] = await both_modes(api, COMPLETIONS, **body, logit_bias=bias, return_tokens_as_token_ids=True)
        [named] = third.logprobs["top_logprobs"]
        assert list(named) == [f"token_id:{token_id}" for token_id in (131, 128, 240, 97, 98)]


@pytest.mark.parametrize("skip", [True, False])
async def test_log_2b_special_tokens_among_the_alternatives(
    skip: bool, forced_model: Callable[..., ForcedModel]
) -> None:
    model = forced_model("smol")
    model.scores(ranked(81, 2, 0))
    async with model.serving() as api:
        common: dict[str, Any] = {"max_tokens": 1, "skip_special_tokens": skip}
        [answer] = await both_modes(api, CHAT, **common, logprobs=True, top_logprobs=3)
        [entry] = answer.logprobs["content"]
        assert [each["token"] for each in entry["top_logprobs"]] == ["a", "<|im_end|>", "<|endoftext|>"]
        [answer] = await both_modes(api, COMPLETIONS, **common, logprobs=3)
        assert list(answer.logprobs["top_logprobs"][0]) == ["a", "<|im_end|>", "<|endoftext|>"]


@pytest.mark.parametrize("name", ["smol", "wordmark"])
async def test_log_2c_token_strings_add_up_to_the_text(name: str, forced_model: Callable[..., ForcedModel]) -> None:
    model = forced_model(name)
    tokenizer = model.llm.engine.tokenizer
    # Tokens that are whole characters; wordmark's bytes 3 to 258 are parts of them.
    usable = range(300, 20_000) if name == "smol" else range(259, 281)
    ids = np.array([each for each in usable if "\ufffd" not in tokenizer.decode([each])])
    model.scores(drawn_from(ids, model.vocab_size))
    async with model.serving() as api:
        common: dict[str, Any] = {"temperature": 1, "seed": 3, "max_tokens": 30, "ignore_eos": True}
        [answer] = await both_modes(api, COMPLETIONS, prompt="It", logprobs=0, **common)
        scores = answer.logprobs
        assert "".join(scores["tokens"]) == answer.text
        ends = [*scores["text_offset"][1:], len(answer.text)]
        assert [end - start for start, end in zip(scores["text_offset"], ends, strict=True)] == [
            len(token) for token in scores["tokens"]
        ]
        assert len(scores["tokens"]) == 30
        if name == "wordmark":
            model.says([271, 280])
            [answer] = await both_modes(api, COMPLETIONS, prompt="It", logprobs=0, max_tokens=2)
            assert answer.logprobs["tokens"] == [" It", " is"]
            return
        [answer] = await both_modes(api, CHAT, prompt="It", logprobs=True, **common)
        assert bytes(byte for entry in answer.logprobs["content"] for byte in entry["bytes"]).decode() == answer.text


async def test_log_2c_bytes_of_half_characters_add_up_too(model: ForcedModel, api: Api) -> None:
    model.says([97, 261, 131, 240, 262, 128, 98, 257])
    [answer] = await both_modes(api, CHAT, logprobs=True)
    joined = bytes(byte for entry in answer.logprobs["content"][:-1] for byte in entry["bytes"])
    assert joined.decode() == answer.text == "a ☃😀b"
    [answer] = await both_modes(api, COMPLETIONS, logprobs=0)
    assert answer.logprobs["text_offset"] == [0, 1, 2, 3, 3, 3, 4, 5]


@pytest.mark.parametrize("stop", [None, ["KLMNOPQ"]])
async def test_log_3_streams_carry_logprobs(stop: list[str] | None, model: ForcedModel, api: Api) -> None:
    # "KLM" and "N" wait until "b" shows that they are no stop.
    model.says([97, 264, 78, 98, 99])
    [answer] = await both_modes(api, CHAT, stop=stop, max_tokens=8, logprobs=True, top_logprobs=3)
    assert [len(entry["top_logprobs"]) for entry in answer.logprobs["content"]] == [3] * 6
    [answer] = await both_modes(api, COMPLETIONS, stop=stop, max_tokens=8, logprobs=3)
    assert {len(values) for values in answer.logprobs.values()} == {6}
    body = {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 3}
    await api.refused(CHAT, body, "top_logprobs")


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "aKLMNOPQ")])
async def test_log_3a_logprobs_of_tokens_that_a_stop_cut_away(
    include: bool, text: str, model: ForcedModel, api: Api
) -> None:
    model.says([97, 264, 78, 265, 81])
    common: dict[str, Any] = {"stop": ["KLMNOPQ"], "include_stop_str_in_output": include}
    [answer] = await both_modes(api, COMPLETIONS, logprobs=1, **common)
    assert answer.ending == (text, "stop", "KLMNOPQ", 5)
    assert {len(values) for values in answer.logprobs.values()} == {5}
    [answer] = await both_modes(api, CHAT, logprobs=True, top_logprobs=1, **common)
    assert answer.text == text
    assert len(answer.logprobs["content"]) == 5


async def test_log_3b_zero_is_not_none(model: ForcedModel, api: Api) -> None:
    model.scores(ranked(97, 98))
    for logprobs, length in ((0, 1), (20, 20)):
        [answer] = await both_modes(api, COMPLETIONS, max_tokens=3, logprobs=logprobs)
        assert [len(entry) for entry in answer.logprobs["top_logprobs"]] == [length] * 3
    # A chosen token that is not among the best is listed beside them.
    biased = {"logit_bias": {"290": 100}, "return_tokens_as_token_ids": True}
    [answer] = await both_modes(api, COMPLETIONS, max_tokens=1, logprobs=20, **biased)
    assert len(answer.logprobs["top_logprobs"][0]) == 21
    [answer] = await whole(api, COMPLETIONS, max_tokens=3, logprobs=None)
    assert answer.logprobs is None
    for top in (0, None):
        [answer] = await both_modes(api, CHAT, max_tokens=3, logprobs=True, top_logprobs=top)
        assert [entry["top_logprobs"] for entry in answer.logprobs["content"]] == [[]] * 3
        assert all(entry["logprob"] < 0 for entry in answer.logprobs["content"])
    [answer] = await whole(api, CHAT, max_tokens=3, logprobs=False)
    assert answer.logprobs is None
