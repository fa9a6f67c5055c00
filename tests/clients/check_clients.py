"""LangChain's ChatOpenAI, LiteLLM and the openai client against a running server; see README.md beside this file."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable
from typing import Any

QUESTION = "What is the capital of France?"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "title": "Capital",
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "population": {"type": "integer", "maximum": 99999999}},
    "required": ["city", "population"],
    "additionalProperties": False,
}


def check_langchain(url: str, key: str, model: str) -> None:
    """invoke, stream, batch, bind_tools with a forced tool, with_structured_output."""
    from langchain_openai import ChatOpenAI

    options: dict[str, Any] = {"base_url": url, "api_key": key, "model": model, "temperature": 0, "max_tokens": 64}
    chat = ChatOpenAI(**options)
    whole = chat.invoke(QUESTION)
    assert whole.content and whole.usage_metadata["output_tokens"] > 0, whole
    streamed = "".join(str(chunk.content) for chunk in chat.stream(QUESTION))
    assert streamed == whole.content, (streamed, whole.content)
    assert len(chat.batch([QUESTION, "Say hello."])) == 2
    asynchronous = asyncio.run(ChatOpenAI(**options).ainvoke(QUESTION))
    assert asynchronous.content == whole.content
    [call] = chat.bind_tools([TOOL], tool_choice="get_weather").invoke("How is the weather in Rome?").tool_calls
    assert call["name"] == "get_weather" and set(call["args"]) == {"city"}, call
    found = chat.with_structured_output(SCHEMA, method="json_schema").invoke("Name a capital.")
    assert set(found) == {"city", "population"}, found


def check_litellm(url: str, key: str, model: str) -> None:
    """completion, stream, acompletion, tools, embedding."""
    import os

    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network for prices
    import litellm

    options: dict[str, Any] = {"model": f"openai/{model}", "api_base": url, "api_key": key}
    messages = [{"role": "user", "content": QUESTION}]
    whole = litellm.completion(messages=messages, temperature=0, max_tokens=32, **options)
    text = whole.choices[0].message.content
    assert text and whole.usage.completion_tokens > 0, whole
    chunks = litellm.completion(messages=messages, temperature=0, max_tokens=32, stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    later = asyncio.run(litellm.acompletion(messages=messages, temperature=0, max_tokens=32, **options))
    assert later.choices[0].message.content == text
    forced = litellm.completion(messages=messages, tools=[TOOL], tool_choice="required", max_tokens=64, **options)
    assert json.loads(forced.choices[0].message.tool_calls[0].function.arguments)["city"] is not None
    vectors = litellm.embedding(input=["one", "two"], **options)
    assert len(vectors.data) == 2 and len(vectors.data[0]["embedding"]) > 0


def check_openai(url: str, key: str, model: str) -> None:
    """Errors as exceptions, logprobs, structured parse, asynchronous streams."""
    import openai
    from pydantic import BaseModel, Field

    class Capital(BaseModel):
        city: str = Field(max_length=20)
        is_large: bool

    client = openai.OpenAI(base_url=url, api_key=key)
    messages: Any = [{"role": "user", "content": QUESTION}]
    scored = client.chat.completions.create(model=model, messages=messages, max_tokens=4, logprobs=True, top_logprobs=3)
    assert all(len(entry.top_logprobs) == 3 for entry in scored.choices[0].logprobs.content)
    parsed = client.chat.completions.parse(model=model, messages=messages, response_format=Capital, max_tokens=64)
    assert isinstance(parsed.choices[0].message.parsed, Capital), parsed
    try:
        client.chat.completions.create(model=model, messages=messages, temperature=-1)
    except openai.BadRequestError as error:
        assert error.param == "temperature", error
    else:
        raise AssertionError("a wrong temperature was accepted")

    async def stream() -> str:
        async with openai.AsyncOpenAI(base_url=url, api_key=key) as other:
            chunks = await other.chat.completions.create(
                model=model, messages=messages, max_tokens=16, temperature=0, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    whole = client.chat.completions.create(model=model, messages=messages, max_tokens=16, temperature=0)
    assert asyncio.run(stream()) == whole.choices[0].message.content


CHECKS: tuple[Callable[[str, str, str], None], ...] = (check_openai, check_langchain, check_litellm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="default: %(default)s")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="default: %(default)s")
    options = parser.parse_args()
    for check in CHECKS:
        check(options.url, options.api_key, options.model)
        print(f"ok    {check.__name__.removeprefix('check_')}", flush=True)


if __name__ == "__main__":
    main()
