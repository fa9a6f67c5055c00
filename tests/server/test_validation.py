"""What is refused, with which parameter; and that refused requests leave no trace."""

from __future__ import annotations

import json
import time

import pytest
from api_client import Api
from fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
BOTH = [(COMPLETIONS, {"prompt": "Hi"}), (CHAT, {"messages": [{"role": "user", "content": "Hi"}]})]
both = pytest.mark.parametrize(("path", "base"), BOTH, ids=["completions", "chat"])


@pytest.fixture(autouse=True)
async def healthy_after(api: Api, engine: FakeEngine):
    """After each test nothing runs and a normal request is served."""
    yield
    assert not engine.running
    assert (await api.client.get("/health")).status_code == 200
    assert (await api.complete(prompt="Hi"))["choices"][0]["text"]


async def refuse_all(api: Api, engine: FakeEngine, path: str, base: dict, parameter: str, values: list) -> None:
    for value in values:
        for stream in (False, True):
            await api.refused(path, base | {parameter: value, "stream": stream}, parameter)
    assert not engine.seen, "a refused request reached the engine"


@both
@pytest.mark.parametrize("stop", ["", [""], ["yes", ""], 5, True, {"a": 1}, ["a", 5], [["a"]], ["x"] * 17, "x" * 1025])
async def test_stop_3_and_3a_bad_stop_strings(api, engine, path, base, stop):
    await refuse_all(api, engine, path, base, "stop", [stop])


@both
async def test_stop_3b_empty_collections(api, engine, path, base):
    for field, value in [
        ("bad_words", [""]),
        ("allowed_token_ids", []),
    ]:
        await refuse_all(api, engine, path, base, field, [value])
    if path == CHAT:
        await refuse_all(api, engine, path, base, "tools", [[]])
        await refuse_all(api, engine, path, base, "messages", [[]])
    plain = await api.post(path, base)
    empty = await api.post(path, base | {"logit_bias": {}, "stop_token_ids": [], "bad_words": [], "stop": []})
    assert empty.json()["choices"] == plain.json()["choices"]


@both
@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("bad_words", ["x", 5, ["x", 5], ["x"] * 129]),
        ("structured_outputs", [{}, 5, {"json": {}, "regex": "a"}]),  # more in test_structured.py
        ("response_format", ["text", 5]),
        ("use_beam_search", [1, "true"]),
        ("length_penalty", ["x", True, 2.0, 0]),
        ("early_stopping", ["x", 1, 0, True, "never"]),
        ("priority", [1, -1, 5, 0.5, "a", True, 2**63, 2**70, -(2**63) - 1]),
        ("n", [1_000_000, 129, 0, -1, 1.5, "2", True]),
        ("temperature", [-0.1, 2.1, "x", True]),
        ("top_p", [0, 1.1, -1]),
        ("top_k", [-2, 1.5, "x"]),
        ("min_p", [-0.1, 1.1]),
        ("presence_penalty", [-2.1, 2.1]),
        ("frequency_penalty", [-2.1, 2.1]),
        ("repetition_penalty", [0, -1]),
        ("seed", [2**63, -(2**63) - 1, 1.5, "1", True]),
        ("min_tokens", [-1, 2.5, 7]),
        ("max_tokens", [4.5, "4", True, 65, 1_000_000_000_000, -1, 0]),
        ("stop_token_ids", [[294], [-1], ["x"], 5, "", [1] * 129]),
        ("prompt_logprobs", [-1, 21, True, "1"]),
        ("stream_interval", [0, 1.5]),
        ("truncate_prompt_tokens", [0, 64, -2, True]),
        ("truncation_side", ["middle", 1]),
        ("cache_salt", ["", "x" * 129, "a\nb", "a\0b", 5, ["a"]]),
        ("request_id", ["", 5, ["a"], "a\nb", "ä"]),
        ("ignore_eos", [1, "true"]),
        ("skip_special_tokens", [1]),
        ("spaces_between_special_tokens", [1]),
        ("include_stop_str_in_output", [1]),
        ("add_special_tokens", [1]),
        ("return_token_ids", [1]),
        ("return_tokens_as_token_ids", [1]),
        ("echo", [1]),
        ("model", [5, ["x"]]),
        ("user", [5]),
    ],
)
async def test_min_1a_every_field_is_checked(api, engine, path, base, field, values):
    await refuse_all(api, engine, path, base | {"max_tokens": 6}, field, values)


@both
async def test_stream_flags_of_the_wrong_type(api, path, base):
    await api.refused(path, base | {"stream": 1}, "stream")
    for name in ("include_usage", "continuous_usage_stats"):
        await api.refused(path, base | {"stream": True, "stream_options": {name: 1}}, f"stream_options.{name}")
    await api.refused(path, base | {"stream": True, "stream_options": 5}, "stream_options")
    await api.refused(path, base | {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs")


@both
async def test_use_1a_stream_options_need_stream(api, path, base):
    await api.refused(path, base | {"stream_options": {"include_usage": True}}, "stream_options")


@both
async def test_fair_1b_pfx_3b_good_values_reach_the_engine_and_bad_ones_do_not(api, engine, path, base):
    engine.scheduling_policy = "priority"
    for priority in (None, 0, -3, 5.0, 2**63 - 1, -(2**63)):
        assert (await api.post(path, base | {"priority": priority, "cache_salt": "a" * 128})).status_code == 200
    assert engine.priorities == [0, 0, -3, 5, 2**63 - 1, -(2**63)]
    assert {salt for _, _, salt in engine.seen} == {"a" * 128}
    for priority in ("a", 2**70, True, 0.5):
        await api.refused(path, base | {"priority": priority}, "priority")
    for salt in ("", 5, ["a"], "x" * 129, "a\0b"):
        await api.refused(path, base | {"cache_salt": salt}, "cache_salt")


async def test_fields_of_one_endpoint(api, engine):
    await refuse_all(api, engine, COMPLETIONS, {"prompt": "a"}, "suffix", ["x", 5])
    await refuse_all(api, engine, COMPLETIONS, {"prompt": "a"}, "best_of", [2, "1"])
    base = BOTH[1][1]
    await refuse_all(api, engine, CHAT, base, "chat_template", ["{{ 1 }}"])
    await refuse_all(api, engine, CHAT, base, "tool_choice", ["auto", "required", {"type": "function"}])
    await refuse_all(api, engine, CHAT, base, "chat_template_kwargs", [5, {"messages": []}, {"tools": []}])
    await refuse_all(api, engine, CHAT, base, "max_completion_tokens", [0, 65, "1"])


async def test_tolerated_values_change_nothing(api):
    tolerated = {
        "best_of": 1, "suffix": "", "user": "u", "priority": 0, "unknown_field": 5, "top_k": 100_000,
        "use_beam_search": False, "length_penalty": 1, "early_stopping": False, "stream_options": None,
        "response_format": {"type": "text"}, "structured_outputs": None, "logprobs": None, "temperature": None,
    }  # fmt: skip
    plain = await api.complete(prompt="Hi")
    assert (await api.complete(prompt="Hi", **tolerated))["choices"] == plain["choices"]
    chat = {"tool_choice": "none", "tools": None, "parallel_tool_calls": True, "chat_template": None, "best_of": 1}
    assert (await api.chat(**chat))["choices"] == (await api.chat())["choices"]


@pytest.mark.parametrize(
    "bias", [{"294": 1}, {"-1": 1}, {"abc": 1}, {"5.0": 1}, {"7": 100.5}, {"7": "x"}, {"7": None}, [1], 5]
)
async def test_val_1_logit_bias(api, engine, bias):
    for path, base in BOTH:
        await refuse_all(api, engine, path, base, "logit_bias", [bias])


async def test_val_1_logit_bias_not_a_number_and_good_ones(api, engine):
    await api.refused(COMPLETIONS, b'{"prompt": "a", "logit_bias": {"7": NaN}}', "logit_bias")
    for bias in ({}, {"293": -100}, {"97": 100}):
        await api.complete(prompt="a", logit_bias=bias)
    assert [dict(params.logit_bias) for _, params, _ in engine.seen] == [{}, {293: -100}, {97: 100}]


async def test_val_1a_allowed_token_ids(api, engine):
    for value in ([294], [-1], [4294967296], ["5"], [5.5], [True], [[5]], 5):
        for path, base in BOTH:
            await refuse_all(api, engine, path, base, "allowed_token_ids", [value])
    await api.complete(prompt="a", allowed_token_ids=[0, 293])
    assert engine.seen[0][1].allowed_token_ids == [0, 293]


async def test_val_1b_first_and_last_id(api, engine):
    engine.script = lambda prompt, sample: [293]
    body = {"prompt": [0], "logit_bias": {"0": 1, "293": 1}, "allowed_token_ids": [293], "stop_token_ids": [293]}
    answer = await api.complete(**body)
    assert answer["choices"][0]["stop_reason"] == 293


@pytest.mark.parametrize(
    ("prompt", "index"),
    [
        ([[-1]], "[0][0]"),
        ([[0, 294]], "[0][1]"),
        ([[1.5]], "[0][0]"),
        ([["a"]], "[0][0]"),
        ([[True]], "[0][0]"),
        ([[1099511627776]], "[0][0]"),
        ([1, "a"], "[1]"),
        ([-1], "[0]"),
        ([[[1]]], "[0][0]"),
        ([1, [2]], "[1]"),
        ([[1], "a"], "[1]"),
        (["a", 1], "[1]"),
        ({"a": 1}, ""),
        (5, ""),
        (True, ""),
        ([None], "[0]"),
        (None, ""),
        (["97"[:0]], ""),
    ],
)
async def test_val_2_val_2b_bad_prompts(api, engine, prompt, index):
    message = await api.refused(COMPLETIONS, {"prompt": prompt}, "prompt")
    assert message.startswith("prompt" + index)
    assert not engine.seen


async def test_val_2b_four_good_shapes(api):
    for prompt, count in [("a", 1), (["a", "b"], 2), ([97, 98], 1), ([[97], [98, 99]], 2)]:
        assert len((await api.complete(prompt=prompt))["choices"]) == count
    await api.refused(COMPLETIONS, {}, "prompt")


async def test_val_2c_ways_to_write_an_integer(api, engine):
    for literal in (b"[97.0, 98]", b"[9.7e1]"):
        assert (await api.post(COMPLETIONS, b'{"prompt": ' + literal + b"}")).status_code == 200
    for literal in (b'["97", 1]', b"[97.5]", b"[1e400]"):
        await api.refused(COMPLETIONS, b'{"prompt": ' + literal + b"}", "prompt")
    answer = await api.complete(prompt="a", max_tokens=2.0, n=2.0, seed=3.0)
    assert answer["usage"]["completion_tokens"] == 4
    assert engine.seen[-1][1].seed == 3


@both
async def test_val_3_quick_refusal_of_huge_counts(api, path, base):
    await api.refused_at_once(path, base | {"n": 1_000_000}, "n")
    assert len((await api.post(path, base | {"n": 4, "temperature": 0})).json()["choices"]) == 4


async def test_val_3a_long_lists(api, engine):
    for prompt in (["a"] * 1025, ["a"] * 100_000, [[1]] * 1025):
        start = time.monotonic()
        assert "1024" in await api.refused(COMPLETIONS, {"prompt": prompt}, "prompt")
        assert time.monotonic() - start < 0.5
    await api.refused(COMPLETIONS, {"prompt": "a", "allowed_token_ids": [1] * 1_000_000}, "allowed_token_ids")
    await api.refused(COMPLETIONS, {"prompt": "a", "use_beam_search": True, "n": 1_000_000}, "n")
    assert not engine.seen
    assert len((await api.complete(prompt=["a"] * 200, max_tokens=1))["choices"]) == 200


async def test_val_3b_limits_that_cannot_be_had(api):
    answer = await api.complete(prompt=[97] * 10, max_tokens=64, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 54
    assert answer["choices"][0]["finish_reason"] == "length"
    message = await api.refused(COMPLETIONS, {"prompt": [97] * 10, "max_tokens": 65}, "max_tokens")
    assert "64" in message
    assert "65" in message
    await api.complete(prompt=[97] * 10, max_tokens=54, logprobs=20)


async def test_prompt_too_long_names_both_lengths(api, engine):
    for length in (64, 70):
        for prompt in ([97] * length, "c" * length, [[97], [97] * length]):
            message = await api.refused(COMPLETIONS, {"prompt": prompt}, "prompt")
            assert str(length) in message
            assert "64" in message
    message = await api.refused(CHAT, {"messages": [{"role": "user", "content": "a b" * 40}]}, "messages")
    assert "64" in message
    assert not engine.seen


async def test_emp_1_prompts_without_tokens(api, engine):
    for prompt, index in [("", ""), ([""], ""), ([], ""), ([[]], "[0]"), (["ok", ""], "[1]"), ([[97], []], "[1]")]:
        message = await api.refused(COMPLETIONS, {"prompt": prompt}, "prompt")
        assert message.startswith("prompt" + index)
    await api.refused(CHAT, {"messages": []}, "messages")
    await api.refused(CHAT, {}, "messages")
    assert not engine.seen


async def test_emp_1_a_beginning_token_alone_is_a_prompt(wordmark_tokenizer):
    api = Api(FakeEngine(wordmark_tokenizer, [271]))
    for prompt in ("", [""]):
        assert (await api.complete(prompt=prompt, max_tokens=1))["usage"]["prompt_tokens"] == 1
        await api.refused(COMPLETIONS, {"prompt": prompt, "add_special_tokens": False}, "prompt")
    for prompt in ([], [[]]):
        await api.refused(COMPLETIONS, {"prompt": prompt}, "prompt")


async def test_emp_1b_blanks_are_tokens(api):
    for prompt in (" ", "\n", "\t", [[32]]):
        assert (await api.complete(prompt=prompt))["usage"]["prompt_tokens"] == 1
    answer = await api.chat(messages=[{"role": "user", "content": ""}])
    assert answer["usage"]["prompt_tokens"] == len("[user]") + 1 + len("[assistant]")


async def test_emp_1c_truncation(api, engine):
    ids = list(range(100))
    for limit, side, kept in [
        (1, "left", ids[-1:]),
        (1, "right", ids[:1]),
        (63, "left", ids[-63:]),
        (-1, "right", ids[:63]),
        (10, None, ids[-10:]),
    ]:
        body = {"truncate_prompt_tokens": limit, "truncation_side": side, "return_token_ids": True, "max_tokens": 5}
        answer = await api.complete(prompt=ids, **body)
        assert answer["choices"][0]["prompt_token_ids"] == kept
        assert engine.seen[-1][0] == kept
        assert answer["usage"]["prompt_tokens"] == len(kept)
        assert answer["usage"]["completion_tokens"] <= 64 - len(kept)


async def test_lim_1c_zero_limits(api):
    for name in ("max_tokens", "max_completion_tokens"):
        await api.refused(CHAT, {"messages": [{"role": "user", "content": "Hi"}], name: 0}, name)
    answer = await api.complete(prompt="Hi", max_tokens=None, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 16
    answer = await api.chat(ignore_eos=True)
    assert answer["usage"]["total_tokens"] == 64
    answer = await api.chat(ignore_eos=True, max_completion_tokens=3, max_tokens=9)
    assert answer["usage"]["completion_tokens"] == 3


async def test_log_3b_zero_absent_and_false(api):
    for value in (21, -1, -2, True, "1"):
        await api.refused(COMPLETIONS, {"prompt": "Hi", "logprobs": value}, "logprobs")
    for value in (None, 0, 20):
        logprobs = (await api.complete(prompt="Hi", logprobs=value))["choices"][0]["logprobs"]
        assert (logprobs is None) == (value is None)
        if value == 0:
            assert [len(entry) for entry in logprobs["top_logprobs"]] == [1] * 4
    base = BOTH[1][1]
    for value in (21, -1, True):
        await api.refused(CHAT, base | {"logprobs": True, "top_logprobs": value}, "top_logprobs")
    await api.refused(CHAT, base | {"logprobs": 1}, "logprobs")
    await api.refused(CHAT, base | {"top_logprobs": 3}, "top_logprobs")
    for value in (None, 0):
        content = (await api.chat(logprobs=True, top_logprobs=value))["choices"][0]["logprobs"]["content"]
        assert [entry["top_logprobs"] for entry in content] == [[]] * 4
        assert content[0]["logprob"] == -0.5
    assert (await api.chat(logprobs=False, top_logprobs=0))["choices"][0]["logprobs"] is None


@both
async def test_unknown_model_is_404_after_field_checks(api, path, base):
    assert "nope" in await api.refused(path, base | {"model": "nope"}, "model", 404)
    await api.refused(path, base | {"model": "nope", "n": 0}, "n")
    await api.refused(path, base | {"model": "x" * 10_000}, "model", 404)
    assert (await api.post(path, base | {"model": "fake"})).status_code == 200


@both
async def test_values_of_the_model_come_before_defaults(engine, path, base):
    engine.generation_config = {"temperature": 0.6, "top_k": 7, "max_new_tokens": 9}
    api = Api(engine)
    await api.post(path, base)
    await api.post(path, base | {"temperature": 0.25, "top_k": 0})
    assert [(params.temperature, params.top_k) for _, params, _ in engine.seen] == [(0.6, 7), (0.25, 0)]


async def test_messages_echo_little_of_the_input(api):
    message = await api.refused(COMPLETIONS, {"prompt": "a", "stop": ["x", {"y": "z" * 5000}]}, "stop")
    assert len(message) < 400
    body = json.dumps({"prompt": "a", "k" * 5000: 1}).replace(": 1", ": NaN").encode()
    await api.refused(COMPLETIONS, body, "k" * 200)
