"""Case MIN-1a: no field is taken without effect. A new field must join one of the lists below."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from api_client import Api, events
from asking import CHAT, COMPLETIONS, PATHS, body_for
from driving import ask, run
from forced import BEST, IMPOSSIBLE, ForcedModel, Rule

from jaxpage import RequestOutputKind, SamplingParams
from jaxpage.server.openapi.requests import request_schemas
from jaxpage.server.protocol import UNSUPPORTED_FIELDS

pytestmark = pytest.mark.anyio
SERVER_TESTS = Path(__file__).parents[1] / "server"
X, Y, Z, SPECIAL, END = 88, 89, 90, 258, 257
Look = Callable[[dict[str, Any]], Any]


def fixed(scores: Mapping[int, float]) -> Rule:
    return lambda prompt, output, sample: scores


def says(*ids: int) -> Rule:
    return lambda prompt, output, sample: {(*ids, *[END] * 99)[len(output)]: BEST}


def alternating(prompt: list[int], output: list[int], sample: int) -> dict[int, float]:
    """Beams see more here than the greedy way: Y is worse now and better later."""
    if not output:
        return {X: 10.0, Y: 9.5}
    return {X: 10.0, Z: 10.0} if output[-1] == X else {Y: 12.0}


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in answer["choices"]]


def counts(answer: dict[str, Any]) -> int:
    return answer["usage"]["completion_tokens"]


def prompt_ids(answer: dict[str, Any]) -> list[int]:
    return answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]


def has(key: str) -> Look:
    """Whether an answer or its first choice has something under ``key``."""
    return lambda answer: (answer.get(key) or answer["choices"][0].get(key)) is not None


LETTERS = fixed({X: 5.0, Y: 4.5, Z: 4.0})
LIKELY: Rule = lambda prompt, output, sample: dict.fromkeys(range(294), IMPOSSIBLE) | {X: 2.0, Y: 1.0, Z: 0.0}  # noqa: E731
WARM = {"temperature": 1, "seed": 3, "max_tokens": 12}
SEVERAL = "several letters"


def is_several(answer: dict[str, Any]) -> str:
    """The text, or that it has several letters: which ones is a matter of the seed."""
    [text] = texts(answer)
    return SEVERAL if len(set(text)) > 1 else text


class Effect(NamedTuple):
    """What a field does: what ``look`` sees with it and without it."""

    value: Any
    expected: Any
    without: Any
    rule: Rule = LETTERS
    base: Mapping[str, Any] = {}
    look: Look = texts


PLAIN = ["XXXX"]
EFFECTS: dict[str, Effect] = {
    "n": Effect(2, PLAIN * 2, PLAIN),
    "temperature": Effect(0, "X" * 12, SEVERAL, LIKELY, WARM | {"temperature": None}, is_several),
    "top_p": Effect(0.5, "X" * 12, SEVERAL, LIKELY, WARM, is_several),
    "top_k": Effect(1, "X" * 12, SEVERAL, LIKELY, WARM, is_several),
    "min_p": Effect(0.5, "X" * 12, SEVERAL, LIKELY, WARM, is_several),
    "presence_penalty": Effect(1, ["XYXX"], PLAIN),
    "frequency_penalty": Effect(1, ["XYXZ"], PLAIN),
    "repetition_penalty": Effect(2, ["XYZX"], PLAIN),
    "stop": Effect("Y", ["X"], ["XYYY"], says(X, Y, Y, Y)),
    "stop_token_ids": Effect([Y], ["X"], ["XYYY"], says(X, Y, Y, Y)),
    "ignore_eos": Effect(True, 4, 2, says(X), {}, counts),
    "min_tokens": Effect(3, 4, 1, says(), {}, counts),
    "max_tokens": Effect(2, ["XX"], ["X" * 16], LETTERS, {"max_tokens": 16}),
    "skip_special_tokens": Effect(False, ["X<|end|>Y"], ["XY"], says(X, SPECIAL, Y)),
    "include_stop_str_in_output": Effect(True, ["XY"], ["X"], says(X, Y), {"stop": "Y"}),
    "logit_bias": Effect({str(Y): 10}, ["YYYY"], PLAIN),
    "allowed_token_ids": Effect([Z], ["ZZZZ"], PLAIN),
    "bad_words": Effect(["X"], ["YYYY"], PLAIN),
    "use_beam_search": Effect(
        True, ["YYYY", "XXXX"], ["XXXX", "XXXX"], alternating, {"n": 2, "ignore_eos": True}
    ),
    "prompt_logprobs": Effect(1, True, False, look=has("prompt_logprobs")),
    "response_format": Effect({"type": "json_object"}, "{", "X", look=lambda answer: texts(answer)[0][0]),
    "structured_outputs": Effect({"choice": ["YZ"]}, ["YZ"], PLAIN),
    "guided_json": Effect({"const": 7}, ["7"], PLAIN),
    "guided_regex": Effect("Z{3}", ["ZZZ"], PLAIN),
    "guided_choice": Effect(["ZY"], ["ZY"], PLAIN),
    "guided_grammar": Effect('start: "ZZ"', ["ZZ"], PLAIN),
    "truncate_prompt_tokens": Effect(1, 1, 30, look=lambda answer: len(prompt_ids(answer))),
    "return_tokens_as_token_ids": Effect(True, f"token_id:{X}", "X", look=lambda answer: first_name(answer)),
    "return_token_ids": Effect(True, True, False, base={"return_token_ids": None}, look=has("token_ids")),
    "request_id": Effect("mine", True, False, look=lambda answer: "mine" in answer["id"]),
    "logprobs": Effect(1, True, False, look=has("logprobs")),
    "echo": Effect(True, True, False, look=lambda answer: texts(answer)[0].endswith("PromptXXXX")),
    "top_logprobs": Effect(
        2, 2, 0, base={"logprobs": True}, look=lambda answer: len(first_entry(answer)["top_logprobs"])
    ),
    "max_completion_tokens": Effect(2, ["XX"], PLAIN),
}  # fmt: skip
"""By field, for both endpoints where both have it; the prompt ends with "Prompt"."""


def first_entry(answer: dict[str, Any]) -> dict[str, Any]:
    return answer["choices"][0]["logprobs"]["content"][0]


def first_name(answer: dict[str, Any]) -> str:
    scores = answer["choices"][0]["logprobs"]
    return scores["tokens"][0] if "tokens" in scores else scores["content"][0]["token"]


REFUSED: dict[str, Any] = {
    "suffix": "x", "best_of": 2, "length_penalty": 2.0, "early_stopping": True, "priority": 1, "beam_width": 2,
    "modalities": ["audio"], "guided_whitespace_pattern": " ", "store": True, "verbosity": "high",
    "service_tier": "flex", "tool_choice": "required",
} | {name: {"a": 1} for name in UNSUPPORTED_FIELDS}  # fmt: skip
"""Values that would have no effect here."""
ELSEWHERE = {
    "add_special_tokens": "test_chat.py", "cache_salt": "test_completions.py", "seed": "", "stream": "", "model": "",
    "stream_options": "test_streaming.py", "stream_interval": "test_streaming.py",
    "truncation_side": "test_validation.py",
    "tools": "test_tools.py", "parallel_tool_calls": "test_tools.py", "add_generation_prompt": "test_chat.py",
    "continue_final_message": "test_chat.py", "chat_template": "test_chat_templates.py",
    "chat_template_kwargs": "test_chat.py", "reasoning_effort": "test_reasoning.py",
    "documents": "test_chat_templates.py", "include_reasoning": "test_reasoning.py",
}  # fmt: skip
"""Fields whose effect the tests of the server show; "": the tests below."""
WITHOUT_EFFECT = {"user", "prompt", "messages", "spaces_between_special_tokens"}
"""The prompt itself; a name for the operator; and a choice between two ways to write special tokens that are the same
here: decoding adds no blanks (see ``IncrementalDetokenizer``)."""


ONLY_CHAT = {"top_logprobs", "max_completion_tokens"}


def fields_of(api: Api, path: str) -> set[str]:
    server = api.app.state.server
    schemas = request_schemas(server.limits, server.model_names)
    return set(schemas["CompletionRequest" if path == COMPLETIONS else "ChatRequest"]["properties"])


async def test_min_1a_every_field_is_in_a_list(api: Api) -> None:
    for path in PATHS:
        assert fields_of(api, path) <= {*EFFECTS, *REFUSED, *ELSEWHERE, *WITHOUT_EFFECT}
    for name, file in ELSEWHERE.items():
        assert not file or name in (SERVER_TESTS / file).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path in PATHS for name in EFFECTS if path == CHAT or name not in ONLY_CHAT]
)
async def test_min_1a_a_field_has_its_effect(name: str, path: str, model: ForcedModel, api: Api) -> None:
    assert name in fields_of(api, path)
    effect = EFFECTS[name]
    model.scores(effect.rule)
    base: dict[str, Any] = {"max_tokens": 4, **effect.base}
    if path == CHAT:
        last = {"role": "assistant", "content": "Prompt"}
        base |= {"messages": [{"role": "user", "content": "x"}, last], "continue_final_message": True}
    else:
        base |= {"prompt": [120] * 24 + list(b"Prompt")}
    if name == "return_tokens_as_token_ids":
        base["logprobs"] = 0 if path == COMPLETIONS else True
    value = True if name == "logprobs" and path == CHAT else effect.value
    answers = []
    for body in (base | {name: value}, base):
        response = await api.post(path, body_for(path, **body))
        assert response.status_code == 200, response.text
        answers.append(effect.look(response.json()))
    if name == "truncate_prompt_tokens" and path == CHAT:
        assert answers[1] > answers.pop() - 1
        answers.append(effect.without)
    assert answers == [effect.expected, effect.without]


@pytest.mark.parametrize("path", PATHS)
async def test_min_1a_what_would_have_no_effect_is_refused(path: str, model: ForcedModel, api: Api) -> None:
    for name in sorted(REFUSED.keys() & fields_of(api, path)):
        await api.refused(path, body_for(path) | {name: REFUSED[name]}, name)
    assert not model.seen


@pytest.mark.parametrize("path", PATHS)
async def test_min_1a_seeds_streams_and_models(path: str, model: ForcedModel, api: Api) -> None:
    model.scores({})
    answers = [
        (await api.post(path, body_for(path, temperature=1, seed=seed, ignore_eos=True))).json() for seed in (1, 2, 1)
    ]
    assert texts(answers[0]) == texts(answers[2]) != texts(answers[1])
    assert len(events((await api.post(path, body_for(path, stream=True))).text)) > 1
    await api.refused(path, body_for(path, model="other"), "model", 404)


def test_min_1a_parameters_of_the_python_api(model: ForcedModel) -> None:
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    own = {"detokenize", "output_kind", "best_of", "structured_outputs", "seed", "logprobs", "prompt_logprobs"}
    own |= names & WITHOUT_EFFECT
    assert names <= EFFECTS.keys() | own
    for name in sorted(names - own):
        effect = EFFECTS[name]
        model.scores(effect.rule)
        base = {"max_tokens": 4, "temperature": 0, "ignore_eos": False} | dict(effect.base)
        base = {key: value for key, value in base.items() if value is not None}
        value = {Y: 10} if name == "logit_bias" else effect.value
        if name == "temperature":
            base["temperature"] = 1
        plain, changed = run(model.llm, [ask([120], **base), ask([120], **(base | {name: value}))])
        with_field = [sample.text for sample in changed.outputs]
        assert with_field != [sample.text for sample in plain.outputs] or name in ("ignore_eos", "min_tokens")
        if effect.look is texts:
            assert with_field == effect.expected
        elif effect.look is counts:
            assert len(changed.outputs[0].token_ids) == effect.expected
            assert len(plain.outputs[0].token_ids) == effect.without


def test_min_1a_what_only_the_python_api_has(model: ForcedModel) -> None:
    model.scores(LETTERS)
    silent, deltas = run(
        model.llm,
        [
            ask([120], max_tokens=4, detokenize=False),
            ask([120], max_tokens=4, logprobs=2, prompt_logprobs=1, output_kind=RequestOutputKind.DELTA),
        ],
    )
    assert (silent.outputs[0].text, deltas.outputs[0].text) == ("", "XXXX")
    assert silent.outputs[0].logprobs is silent.prompt_logprobs is None
    assert [len(entry) for entry in deltas.outputs[0].logprobs or []] == [2] * 4
    assert deltas.prompt_logprobs == [None]
