"""The official openai client against a real server process with a tiny model."""

from __future__ import annotations

import concurrent.futures
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

MODEL = "tiny"
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def url(tiny_model_dir) -> Iterator[str]:
    """The base URL of ``python -m jaxpage.serve`` on a free port."""
    options = ["--served-model-name", MODEL, "--port", "0", "--max-model-len", "256", "--uvicorn-log-level", "warning"]
    options += [
        "--max-num-seqs",
        "16",
        "--max-num-batched-tokens",
        "64",
        "--api-key",
        "key",
        "--tool-prompt",
        "template",
    ]
    command = [sys.executable, "-m", "jaxpage.serve", str(tiny_model_dir("llama")), *options]
    # Standard error stays the test's own, so that a failing start is seen and no pipe can fill up.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        ready = None
        for line in process.stdout:
            ready = re.match(rf"jaxpage: ready: {MODEL} at (\S+)", line)
            if ready:
                break
        assert ready is not None, "the server did not start"
        yield ready[1]
        process.terminate()
        assert process.wait(30) == 0
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    """The openai client; it must never have to repeat a request."""
    with openai.OpenAI(base_url=url, api_key="key", max_retries=0, timeout=120) as client:
        yield client


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_completion_whole_and_streamed(client):
    body = {"model": MODEL, "prompt": "Hello world", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**body)
    chunks = list(client.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    usage = chunks[-1].usage
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1, "all but one token come from the cache"
    usage.prompt_tokens_details = whole.usage.prompt_tokens_details
    assert usage == whole.usage
    assert whole.usage.completion_tokens <= 12
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_chat_whole_and_streamed(client):
    body = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 12, "temperature": 1, "seed": 5}
    whole = client.chat.completions.create(**body, logprobs=True, top_logprobs=2)
    chunks = list(client.chat.completions.create(**body, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    content = whole.choices[0].logprobs.content
    assert len(content) == whole.usage.completion_tokens
    assert all(entry.logprob <= entry.top_logprobs[0].logprob for entry in content)


def test_str_1_samples_and_prompts(client):
    body = {"model": MODEL, "prompt": ["Hello", "world"], "n": 2, "seed": 3, "max_tokens": 6}
    whole = client.completions.create(**body)
    texts = [""] * 4
    for chunk in client.completions.create(**body, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


def test_lim_1_scoring_a_prompt(client):
    body = {"model": MODEL, "prompt": "Hello world", "echo": True, "logprobs": 1, "temperature": 0}
    alone = client.completions.create(**body, max_tokens=0)
    choice = client.completions.create(**body, max_tokens=1, n=2).choices[1]
    assert alone.choices[0].text == "Hello world"
    assert alone.usage.completion_tokens == 0
    count = alone.usage.prompt_tokens
    scores = alone.choices[0].logprobs.token_logprobs
    assert scores[0] is None
    assert choice.logprobs.token_logprobs[1:count] == pytest.approx(scores[1:], abs=1e-4)
    assert len(choice.logprobs.tokens) == count + 1


def test_beam_1a_scores_add_up(client):
    body = {"model": MODEL, "prompt": "Hello world", "max_tokens": 10, "logprobs": 0}
    ids = {"return_token_ids": True}

    def search(width: int, **extra: Any) -> list[tuple[list[int], float]]:
        extra |= ids | {"use_beam_search": True, "ignore_eos": True}
        choices = client.completions.create(**body, n=width, extra_body=extra).choices
        assert [choice.index for choice in choices] == list(range(width))
        return [(choice.token_ids, sum(choice.logprobs.token_logprobs)) for choice in choices]

    beams = search(4)
    assert len({tuple(tokens) for tokens, _ in beams}) == 4
    assert [total for _, total in beams] == sorted((total for _, total in beams), reverse=True)
    greedy = client.completions.create(**body, temperature=0, extra_body=ids | {"ignore_eos": True}).choices[0]
    assert search(1)[0][0] == greedy.token_ids
    for tokens, total in beams:
        scored = body | {"prompt": greedy.prompt_token_ids + tokens, "max_tokens": 0}
        scores = client.completions.create(**scored, echo=True).choices[0].logprobs.token_logprobs
        assert sum(scores[-10:]) == pytest.approx(total, abs=1e-3)


def test_what_this_engine_cannot_search_or_order(client):
    body = {"model": MODEL, "messages": MESSAGES}
    for name, fields in [("n", {"n": 17, "use_beam_search": True}), ("priority", {"priority": 5})]:
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**body, extra_body=fields)
        assert refused.value.param == name
    beams = client.chat.completions.create(**body, n=2, max_tokens=3, extra_body={"use_beam_search": True})
    assert beams.usage.completion_tokens <= 6
    assert len(beams.choices) == 2


def test_pfx_3c_reset_of_the_prefix_cache(client, url):
    body = {"model": MODEL, "prompt": list(range(100, 140)), "max_tokens": 1, "extra_body": {"cache_salt": "pfx-3c"}}

    def cached_tokens() -> int:
        return client.completions.create(**body).usage.prompt_tokens_details.cached_tokens

    def flush(path: str) -> None:
        answer = httpx.post(url.removesuffix("/v1") + path, headers={"Authorization": "Bearer key"})
        assert answer.status_code == 200

    assert [cached_tokens(), cached_tokens()] == [0, 39]
    flush("/flush_cache")
    assert [cached_tokens(), cached_tokens()] == [0, 39]
    long = {"model": MODEL, "prompt": "Hi", "max_tokens": 100, "temperature": 0, "extra_body": {"ignore_eos": True}}
    undisturbed = client.completions.create(**long).choices[0].text
    chunks = iter(client.completions.create(**long, stream=True))
    text = next(chunks).choices[0].text
    flush("/reset_prefix_cache")
    assert text + "".join(chunk.choices[0].text for chunk in chunks) == undisturbed
    assert cached_tokens() == 0


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_tool_1_forced_calls_of_a_random_model(client, choice):
    schema = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("f", "g")]
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 100, "tools": tools, "tool_choice": choice, "seed": 1}
    answer = client.chat.completions.create(**body, parallel_tool_calls=False).choices[0]
    (call,) = answer.message.tool_calls
    assert json.loads(call.function.arguments) in ({"x": 1}, {"x": 2})
    assert call.function.name in ("f", "g") if choice == "required" else call.function.name == "f"
    assert answer.finish_reason == ("tool_calls" if choice == "required" else "stop")
    pieces = [
        piece
        for chunk in client.chat.completions.create(**body, parallel_tool_calls=False, stream=True)
        for piece in chunk.choices[0].delta.tool_calls or []
    ]
    assert "".join(piece.function.arguments for piece in pieces) == call.function.arguments
    assert pieces[0].function.name == call.function.name


def test_tool_1a_a_schema_that_does_not_compile(client):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "dict"}}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[tool], tool_choice="required")
    assert refused.value.param == "tools.0.function.parameters"


def test_errors_have_their_classes(client, url):
    body = {"model": MODEL, "messages": MESSAGES}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**body, temperature=3)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt=[97] * 256)
    assert httpx.get(url.removesuffix("/v1") + "/health").status_code == 200


def test_32_requests_of_mixed_lengths_at_once(client):
    def body(number: int) -> dict:
        prompt = [97 + (number + position) % 26 for position in range(1 + 6 * number)]
        return {"model": MODEL, "prompt": prompt, "max_tokens": 1 + number % 20, "temperature": 0}

    def answer(number: int) -> tuple[str, int, int]:
        if number % 2:
            whole = client.completions.create(**body(number))
            return whole.choices[0].text, whole.usage.prompt_tokens, whole.usage.completion_tokens
        options = {"include_usage": True}
        chunks = list(client.completions.create(**body(number), stream=True, stream_options=options))
        text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
        return text, chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens

    alone = [answer(number) for number in range(0, 32, 5)]
    with concurrent.futures.ThreadPoolExecutor(32) as threads:
        together = list(threads.map(answer, range(32)))
    assert together[::5] == alone
    for number, (_, prompt_tokens, completion_tokens) in enumerate(together):
        assert prompt_tokens == 1 + 6 * number
        assert 1 <= completion_tokens <= 1 + number % 20


def test_leaving_a_stream_frees_the_server(client, url):
    stream = client.completions.create(
        model=MODEL, prompt="Hi", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    for _ in range(100):
        if httpx.get(url.removesuffix("/v1") + "/load").json() == {"server_load": 0}:
            break
    assert client.completions.create(model=MODEL, prompt="Hi", max_tokens=2).choices
    assert httpx.get(url.removesuffix("/v1") + "/load").json() == {"server_load": 0}
