"""POST /v1/completions: echo, stop strings, logprobs and token ids, whole and as a stream."""

from __future__ import annotations

import pytest
from api_client import Api, joined
from fake_engine import FakeEngine

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"


async def both_modes(api: Api, **body) -> dict:
    """The single choice of a whole answer, after comparing it with the joined stream."""
    whole = await api.complete(**body)
    chunks = await api.stream(PATH, **body, stream_options={"include_usage": True})
    *pieces, last = chunks
    choice = whole["choices"][0]
    choices = [chunk["choices"][0] for chunk in pieces]
    assert joined(chunks) == choice["text"]
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + [choice["finish_reason"]]
    assert choices[-1]["stop_reason"] == choice["stop_reason"]
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    if choice["logprobs"] is not None:
        for name, values in choice["logprobs"].items():
            assert [value for c in choices for value in c["logprobs"][name]] == values
    if "token_ids" in choice:
        assert [token_id for c in choices for token_id in c["token_ids"]] == choice["token_ids"]
        assert choices[0]["prompt_token_ids"] == choice["prompt_token_ids"]
    return choice | {"completion_tokens": whole["usage"]["completion_tokens"]}


@pytest.mark.parametrize(
    ("forced", "body", "expected"),
    [
        ([264, 78, 265, 81, 97], {"stop": ["KLMNOPQ"]}, ("", "stop", "KLMNOPQ", 4)),
        ([264, 78, 88, 89, 257], {"stop": ["KLMNOPQ"]}, ("KLMNXY", "stop", None, 5)),
        ([264, 78, 257], {"stop": ["KLMNOPQ"]}, ("KLMN", "stop", None, 3)),
        ([264, 78], {"stop": ["KLMNOPQ"], "max_tokens": 2}, ("KLMN", "length", None, 2)),
        ([264, 78, 265, 81], {"stop": ["NOP", "KLMNOPQR"]}, ("KLM", "stop", "NOP", 3)),
        (
            [264, 78, 265, 81, 97],
            {"stop": ["KLMNOPQ"], "include_stop_str_in_output": True},
            ("KLMNOPQ", "stop", "KLMNOPQ", 4),
        ),
        ([97, 32, 98], {"stop": [" "]}, ("a", "stop", " ", 2)),
        ([97, 275, 98], {"stop": "\n"}, ("a.", "stop", "\n", 2)),
        ([97, 275, 98], {"stop_token_ids": [275]}, ("a", "stop", 275, 2)),
        ([97, 275, 98], {"stop_token_ids": [275], "include_stop_str_in_output": True}, ("a.\n", "stop", 275, 2)),
        ([97, 257, 98], {"ignore_eos": True, "max_tokens": 3}, ("ab", "length", None, 3)),
        ([97, 257, 98], {"ignore_eos": True, "stop_token_ids": [257]}, ("a", "stop", 257, 2)),
    ],
)
async def test_stop_1_and_2_stops_in_both_modes(api: Api, engine: FakeEngine, forced, body, expected):
    engine.script = lambda prompt, sample: forced
    for logprobs in (None, 1):
        choice = await both_modes(api, prompt="Hi", return_token_ids=True, logprobs=logprobs, **body)
        shown = (choice["text"], choice["finish_reason"], choice["stop_reason"], choice["completion_tokens"])
        assert shown == expected
        assert len(choice["token_ids"]) == choice["completion_tokens"]


async def test_stop_1a_hold_back_no_more_than_needed(api, engine):
    engine.script = lambda prompt, sample: [120] * 20 + [97, 98, 120, 257]
    chunks = await api.stream(PATH, prompt="Hi", stop=["abcdefghij"], max_tokens=30)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["x"] * 20 + ["", "", "abx", ""]


async def test_stop_1c_the_prompt_takes_no_part_in_stop_matching(api, engine):
    engine.script = lambda prompt, sample: [78, 265, 81, 257]
    body = {"prompt": "xxKLM", "stop": ["KLMNOPQ", "xx"]}
    for echo, text in ((False, "NOPQ"), (True, "xxKLMNOPQ")):
        choice = await both_modes(api, echo=echo, **body)
        assert (choice["text"], choice["stop_reason"]) == (text, None)


@pytest.mark.parametrize(
    ("skip", "include", "text"),
    [(True, False, "ab"), (True, True, "ab"), (False, False, "ab"), (False, True, "ab<|eos|>")],
)
async def test_stop_2_ending_id_removes_that_token_only(api, engine, skip, include, text):
    engine.script = lambda prompt, sample: [97, 98, 257]
    body = {"stop_token_ids": [257], "skip_special_tokens": skip, "include_stop_str_in_output": include}
    choice = await both_modes(api, prompt="Hi", **body)
    assert (choice["text"], choice["completion_tokens"]) == (text, 3)


async def test_lim_1_scoring_a_prompt(api, engine):
    body = {"prompt": "abKLM", "max_tokens": 0, "logprobs": 2, "echo": True}
    choice = await both_modes(api, **body)
    assert (choice["text"], choice["finish_reason"], choice["completion_tokens"]) == ("abKLM", "length", 0)
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["ab", "KLM"]
    assert logprobs["text_offset"] == [0, 2]
    assert logprobs["token_logprobs"] == [None, -1.5]
    assert logprobs["top_logprobs"] == [None, {"KLM": -1.5, "\x00": -0.25}]
    await api.refused(PATH, body | {"echo": False}, "max_tokens")
    chunks = await api.stream(PATH, **body, n=2)
    assert [(c["choices"][0]["index"], c["choices"][0]["text"]) for c in chunks] == [(0, "abKLM"), (1, "abKLM")]


async def test_lim_1a_and_1b_the_form_that_evaluation_harnesses_send(api):
    body = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
    answer = await api.complete(prompt=[[97, 98, 99, 100], [97, 32], [97]], **body)
    for choice, length in zip(answer["choices"], (5, 3, 2), strict=True):
        values = choice["logprobs"]["token_logprobs"]
        assert len(values) == length
        assert values[0] is None
        assert None not in values[1:]
        assert choice["logprobs"]["text_offset"] == list(range(length))
    assert [choice["text"] for choice in answer["choices"]] == ["abcdHel", "a Hel", "aHel"]


async def test_lim_1c_echo_with_samples_and_streams(api):
    for stream_interval in (1, 3):
        chunks = await api.stream(PATH, prompt=["ab", "c"], n=2, echo=True, stream_interval=stream_interval)
        texts = [joined(chunks, index) for index in range(4)]
        assert texts == ["abHello world"] * 2 + ["cHello world"] * 2


async def test_echo_keeps_text_that_the_vocabulary_writes_otherwise(api):
    choice = await both_modes(api, prompt="a<|end|>b☃", echo=True, logprobs=0)
    assert choice["text"] == "a<|end|>b☃Hello world"
    assert choice["logprobs"]["text_offset"][:3] == [0, 1, 8]
    choice = await both_modes(api, prompt=[97, 258, 98], echo=True, logprobs=0)
    assert choice["text"] == "abHello world"
    choice = await both_modes(api, prompt=[97, 258, 98], echo=True, skip_special_tokens=False)
    assert choice["text"] == "a<|end|>bHello world<|eos|>"[: len(choice["text"])]


async def test_bos_1_exactly_one_beginning_token(wordmark_tokenizer):
    engine = FakeEngine(wordmark_tokenizer, [271])
    api = Api(engine)
    for text, special, count in [("It", True, 1), ("<s>It", True, 1), ("It", False, 0), ("<s>It", False, 1)]:
        body = {"prompt": text, "add_special_tokens": special, "return_token_ids": True, "echo": True, "logprobs": 0}
        answer = await api.complete(**body, max_tokens=1)
        ids = answer["choices"][0]["prompt_token_ids"]
        assert ids.count(1) == ids[:1].count(1) == count
        assert answer["usage"]["prompt_tokens"] == len(ids)
        assert answer["choices"][0]["text"] == text + " It"
        offsets = answer["choices"][0]["logprobs"]["text_offset"]
        assert offsets == sorted(offsets)
        assert offsets[-1] == len(text)


async def test_log_2a_different_ids_with_the_same_string(api, engine):
    engine.script = lambda prompt, sample: [131]
    engine.alternatives = {0: {128: -1.0, 240: -1.5, 97: -2.0, 98: -3.0}}
    logprobs = (await api.complete(prompt="Hi", logprobs=5))["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][0] == logprobs["top_logprobs"][0]["\ufffd"] == -0.5
    engine.script = lambda prompt, sample: [128]
    engine.alternatives = {0: {131: -0.25, 240: -1.5, 97: -2.0, 98: -3.0}}
    logprobs = (await api.complete(prompt="Hi", logprobs=5))["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][0] == -0.5
    assert max(logprobs["top_logprobs"][0].values()) == logprobs["top_logprobs"][0]["\ufffd"] == -0.25
    body = {"prompt": "Hi", "logprobs": 5, "return_tokens_as_token_ids": True}
    logprobs = (await api.complete(**body))["choices"][0]["logprobs"]
    assert set(logprobs["top_logprobs"][0]) == {f"token_id:{i}" for i in (131, 128, 240, 97, 98)}
    assert logprobs["tokens"][0] == "token_id:128"


async def test_log_2b_special_tokens_have_names(api, engine):
    engine.alternatives = {0: {257: -1.0, 258: -2.0}}
    for skip in (True, False):
        top = (await api.complete(prompt="Hi", logprobs=3, skip_special_tokens=skip))["choices"][0]["logprobs"]
        assert {"<|eos|>", "<|end|>"} < set(top["top_logprobs"][0])


async def test_log_3a_logprobs_of_tokens_that_a_stop_cut_away(api, engine):
    engine.script = lambda prompt, sample: [97, 264, 78, 265, 81]
    for include, text in ((False, "a"), (True, "aKLMNOPQ")):
        body = {"stop": ["KLMNOPQ"], "logprobs": 1, "include_stop_str_in_output": include}
        choice = await both_modes(api, prompt="Hi", **body)
        assert choice["text"] == text
        assert {len(values) for values in choice["logprobs"].values()} == {5}


async def test_minus_infinity_is_written_as_a_number(api):
    logprobs = (await api.complete(prompt="Hi", logprobs=4, max_tokens=1))["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"][0]["\x03"] == -9999.0


async def test_prompt_logprobs(api):
    answer = await api.complete(prompt=[97, 98], prompt_logprobs=1, n=2, echo=True, logprobs=0)
    expected = {"0": (-0.25, 1, "\x00"), "98": (-1.5, 2, "b")}
    for choice in answer["choices"]:
        first, second = choice["prompt_logprobs"]
        assert first is None
        assert {i: tuple(entry.values()) for i, entry in second.items()} == expected
        assert choice["logprobs"]["top_logprobs"][1] == {"b": -1.5}
    assert "prompt_logprobs" not in (await api.complete(prompt="a"))["choices"][0]


async def test_salt_and_sampling_values_reach_the_engine(api, engine):
    values = {"seed": -1, "top_p": 0.5, "min_p": 0.1, "min_tokens": 2, "frequency_penalty": 1, "presence_penalty": -1}
    await api.complete(prompt="Hi", cache_salt="s", repetition_penalty=1.5, **values)
    _, params, salt = engine.seen[0]
    assert salt == "s"
    assert params.repetition_penalty == 1.5
    assert {name: getattr(params, name) for name in values} == values


async def test_log_1_samples_that_overtake_the_one_that_scores_the_prompt(api, engine, monkeypatch):
    generate = engine.generate

    async def late_scores(*arguments, **options):
        held = None
        async for output in generate(*arguments, **options):
            if held is None:
                held, output.prompt_logprobs = output.prompt_logprobs, None
            else:
                output.prompt_logprobs, held = (held, []) if held else (None, held)
            yield output

    body = {"prompt": "abKLM", "echo": True, "logprobs": 1, "n": 2}
    expected = (await api.complete(**body))["choices"]
    monkeypatch.setattr(engine, "generate", late_scores)
    assert (await api.complete(**body))["choices"] == expected
    chunks = await api.stream(PATH, **body)
    for index in range(2):
        first = next(c for chunk in chunks for c in chunk["choices"] if c["index"] == index)
        assert first["text"] == "abKLMHel"
        assert first["logprobs"]["tokens"] == ["ab", "KLM", "Hel"]
