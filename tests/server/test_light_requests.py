"""What a short request is spared: threads, and tasks beside its own; and that it ends as others do all the same."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from api_client import Api
from fake_engine import FakeEngine

from jaxpage.server.errors import ClientGoneError
from jaxpage.server.streaming import while_connected

pytestmark = pytest.mark.anyio
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "f"}}
LONG = "word " * 300


def said(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


@pytest.mark.parametrize(
    ("path", "body", "num_threads"),
    [
        (COMPLETIONS, {"prompt": "Hi"}, 0),
        (COMPLETIONS, {"prompt": [72, 105], "n": 2}, 0),
        (COMPLETIONS, {"prompt": ["Hi"] * 3}, 0),
        (COMPLETIONS, {"prompt": LONG}, 1),
        (COMPLETIONS, {"prompt": ["word " * 30] * 10}, 1),
        (COMPLETIONS, {"prompt": [72] * 1500}, 1),
        (COMPLETIONS, {"prompt": "Hi", "bad_words": ["x"]}, 1),
        (COMPLETIONS, {"prompt": "Hi", "structured_outputs": {"regex": "a"}}, 1),
        (CHAT, said("Hi"), 0),
        (CHAT, said([{"type": "text", "text": "Hi"}]), 0),
        (CHAT, said(LONG), 1),
        (CHAT, {"messages": [{"role": "user", "content": ""}] * 150}, 1),
        (CHAT, said("Hi", tools=[TOOL]), 1),
        (CHAT, said("Hi", chat_template_kwargs={"a": 1}), 1),
        (CHAT, said("Hi", chat_template="x"), 1),
        (CHAT, {"messages": [{"role": "user", "content": "Hi", "name": LONG}]}, 1),
    ],
)
async def test_threads_are_for_what_takes_a_while(
    path: str, body: dict[str, Any], num_threads: int, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.max_model_len = 4096
    api = Api(engine, trust_request_chat_template=True)
    server = api.app.state.server
    used: list[int] = []
    in_thread = server.in_thread
    monkeypatch.setattr(server, "in_thread", lambda function: used.append(1) or in_thread(function))
    for stream in (False, True):
        used.clear()
        response = await api.post(path, body | {"stream": stream})
        assert response.status_code == 200, response.text
        assert len(used) == num_threads


async def test_work_ends_when_the_client_goes_or_the_call_is_cancelled() -> None:
    gone, ended = asyncio.Event(), []

    async def receive() -> dict[str, str]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def work(seconds: float) -> str:
        try:
            await asyncio.sleep(seconds)
            return "done"
        finally:
            ended.append(seconds)

    assert await while_connected(receive, work(0)) == "done"
    calls = [asyncio.create_task(while_connected(receive, work(seconds))) for seconds in (10, 20)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    calls[0].cancel()
    await asyncio.wait(calls[:1])
    assert calls[0].cancelled()
    gone.set()
    await asyncio.wait(calls[1:])
    assert isinstance(calls[1].exception(), ClientGoneError)
    assert sorted(ended) == [0, 10, 20]
    current = asyncio.current_task()
    assert current is not None and current.cancelling() == 0


async def test_both_at_once_is_a_cancelled_call() -> None:
    async def receive() -> dict[str, str]:
        call.cancel()  # as the client is seen to be gone
        return {"type": "http.disconnect"}

    call = asyncio.ensure_future(while_connected(receive, asyncio.sleep(10)))
    await asyncio.wait([call])
    assert call.cancelled()
