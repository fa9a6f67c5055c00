"""Cases STOP: where an answer ends, and what of its text the client gets to see."""

from __future__ import annotations

from typing import Any

import pytest
from api_client import Api, joined
from asking import CHAT, COMPLETIONS, PATHS, all_ways, body_for, both_modes
from forced import ForcedModel

pytestmark = pytest.mark.anyio
KLM, N, OP, Q, X, Y = 264, 78, 265, 81, 88, 89


@pytest.mark.parametrize(
    ("forced", "body", "expected"),
    [
        ([KLM, N, OP, Q, 97], {"stop": ["KLMNOPQ"]}, ("", "stop", "KLMNOPQ", 4)),
        ([KLM, N, X, Y, 257], {"stop": ["KLMNOPQ"]}, ("KLMNXY", "stop", None, 5)),
        ([KLM, N, 257], {"stop": ["KLMNOPQ"]}, ("KLMN", "stop", None, 3)),
        ([KLM, N], {"stop": ["KLMNOPQ"], "max_tokens": 2}, ("KLMN", "length", None, 2)),
        ([KLM, N, OP, Q], {"stop": ["NOP", "KLMNOPQR"]}, ("KLM", "stop", "NOP", 3)),
        (
            [KLM, N, OP, Q, 97],
            {"stop": ["KLMNOPQ"], "include_stop_str_in_output": True},
            ("KLMNOPQ", "stop", "KLMNOPQ", 4),
        ),
    ],
)
async def test_stop_1_never_shown_in_part(
    forced: list[int], body: dict[str, Any], expected: tuple[Any, ...], model: ForcedModel, api: Api
) -> None:
    model.says(forced)
    [answer] = await all_ways(api, **body)
    assert answer.ending == expected


@pytest.mark.parametrize(
    ("stop", "forced", "expected"),
    [
        ("lo wo", [268, 269, 274], ("Hel", "stop", "lo wo", 3)),
        ("☃", [97, 261, 131, 98], ("a ", "stop", "☃", 3)),
        ("\u00e9", [101, 204, 129, 257], ("e\u0301", "stop", None, 4)),
    ],
)
async def test_stop_1b_inside_tokens_and_characters(
    stop: str, forced: list[int], expected: tuple[Any, ...], model: ForcedModel, api: Api
) -> None:
    model.says(forced)
    [answer] = await all_ways(api, stop=[stop])
    assert answer.ending == expected
    assert "".join(answer.deltas) == expected[0]


async def test_stop_1c_the_prompt_takes_no_part(model: ForcedModel, api: Api) -> None:
    model.says([N, OP, Q, 257])
    stop = ["KLMNOPQ", "xx"]
    for echo, text in ((False, "NOPQ"), (True, "xxKLMNOPQ")):
        [answer] = await both_modes(api, COMPLETIONS, prompt="xxKLM", stop=stop, echo=echo)
        assert answer.ending == (text, "stop", None, 4)
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "xxKLM"}]
    body = {"messages": messages, "continue_final_message": True, "stop": stop, "temperature": 0}
    choice = (await api.chat(**body))["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("NOPQ", "stop", None)
    assert joined(await api.stream(CHAT, **body)) == "NOPQ"


@pytest.mark.parametrize(
    ("skip", "include", "text"),
    [
        (True, False, "sailing."),
        (True, True, "sailing."),
        (False, False, "sailing."),
        (False, True, "sailing.<|eos|>"),
    ],
)
async def test_stop_2_ending_on_an_id_removes_that_token_only(
    skip: bool, include: bool, text: str, model: ForcedModel, api: Api
) -> None:
    model.says([*b"sailing.", 257])
    options = {"skip_special_tokens": skip, "include_stop_str_in_output": include}
    [answer] = await all_ways(api, stop_token_ids=[257], **options)
    assert answer.ending == (text, "stop", 257, 9)


async def test_stop_2a_an_ordinary_token_as_stop_id(model: ForcedModel, api: Api) -> None:
    model.says([97, 275, 98])
    for include, text in ((False, "a"), (True, "a.\n")):
        [answer] = await all_ways(api, stop_token_ids=[275], include_stop_str_in_output=include)
        assert answer.ending == (text, "stop", 275, 2)
        assert answer.token_ids == [97, 275]


async def test_stop_2b_stop_string_and_stop_id_in_one_step(model: ForcedModel, api: Api) -> None:
    # The id wins: its token is no text, so the string is not there.
    model.says([KLM, N, OP, Q])
    [answer] = await all_ways(api, stop=["NOP"], stop_token_ids=[OP])
    assert answer.ending == ("KLMN", "stop", OP, 3)
    model.says([97, 257, 98])
    [answer] = await all_ways(api, ignore_eos=True, stop_token_ids=[257])
    assert answer.ending == ("a", "stop", 257, 2)
    [answer] = await all_ways(api, ignore_eos=True, max_tokens=3)
    assert answer.token_ids == [97, 257, 98]


@pytest.mark.parametrize(
    ("stop", "forced", "reason"), [(["b", "a"], 286, "a"), (["ab", "abc"], 287, "ab"), (["abc", "ab"], 287, "abc")]
)
async def test_stop_2c_several_match_in_one_step(
    stop: list[str], forced: int, reason: str, model: ForcedModel, api: Api
) -> None:
    model.says([forced])
    [answer] = await all_ways(api, stop=stop)
    assert answer.ending == ("", "stop", reason, 1)


@pytest.mark.parametrize("path", PATHS)
async def test_stop_3_lists_without_strings_are_no_stop(path: str, model: ForcedModel, api: Api) -> None:
    model.says([268, 269, 274])
    [expected] = await both_modes(api, path)
    for stop in ([], None):
        assert await both_modes(api, path, stop=stop) == [expected]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stop", [5, True, {"a": 1}, ["a", 5], [["a"]], ["x"] * 17, "x" * 1025])
async def test_stop_3a_wrong_types_and_sizes_are_refused_at_once(
    path: str, stop: Any, model: ForcedModel, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        tokenized: list[str] = []
        patched.setattr(api.app.state.server.prompts.tokenizer, "encode", lambda text, **kwargs: tokenized.append(text))
        await api.refused_at_once(path, body_for(path, stop=stop), "stop")
        await api.refused(path, body_for(path, prompt="word " * 500_000, stop=stop), "stop")
        assert not tokenized
    assert not model.seen
    model.says([268])
    assert (await api.complete(prompt="Hi"))["choices"][0]["text"] == "Hel"


@pytest.mark.parametrize("path", PATHS)
async def test_stop_3b_empty_collections_of_a_constraint(path: str, model: ForcedModel, api: Api) -> None:
    for value in ({"choice": []}, {"regex": ""}, {"json": ""}):
        for stream in (False, True):
            response = await api.post(path, body_for(path, structured_outputs=value, stream=stream))
            assert response.status_code == 400
            assert response.json()["error"]["param"].startswith("structured_outputs")
    assert not model.seen
    model.says([268, 269, 274])
    [expected] = await both_modes(api, path)
    assert await both_modes(api, path, logit_bias={}, stop_token_ids=[], bad_words=[]) == [expected]


@pytest.mark.parametrize(
    ("stop", "forced", "expected"),
    [
        (" ", [97, 32, 98], ("a", "stop", " ", 2)),
        ("\n", [97, 275, 98], ("a.", "stop", "\n", 2)),
        ("a", [97], ("", "stop", "a", 1)),
    ],
)
async def test_stop_3c_blanks_are_legal(
    stop: str, forced: list[int], expected: tuple[Any, ...], model: ForcedModel, api: Api
) -> None:
    model.says(forced)
    [answer] = await all_ways(api, stop=[stop])
    assert answer.ending == expected
