"""How the server's tests talk to an app: in this process, or over a socket to a server in a thread."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fake_engine import FakeEngine

from jaxpage.server.app import create_app
from jaxpage.server.connections import BoundedProtocol
from jaxpage.server.options import ServerOptions

TOKENIZERS = Path(__file__).parents[1] / "data" / "tokenizers"


class Api:
    """Requests against an app in this process."""

    def __init__(self, engine: FakeEngine, **options: Any) -> None:
        self.app = create_app(engine, ServerOptions(**options))
        # The app answers faults itself: an exception that gets out of it fails the test.
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://test")

    async def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """POST with a JSON body, or with bytes as they are."""
        if isinstance(body, bytes):
            headers = {"Content-Type": "application/json"} | options.pop("headers", {})
            return await self.client.post(path, content=body, headers=headers, **options)
        return await self.client.post(path, json=body, **options)

    async def complete(self, **body: Any) -> dict[str, Any]:
        """POST /v1/completions that must succeed."""
        return _ok(await self.post("/v1/completions", body))

    async def chat(self, **body: Any) -> dict[str, Any]:
        """POST /v1/chat/completions that must succeed."""
        body.setdefault("messages", [{"role": "user", "content": "Hi"}])
        return _ok(await self.post("/v1/chat/completions", body))

    async def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The objects of a stream that must be well formed and end with [DONE]."""
        if "chat" in path:
            body.setdefault("messages", [{"role": "user", "content": "Hi"}])
        response = await self.post(path, body | {"stream": True})
        assert response.status_code == 200, response.text
        return events(response.text)

    async def refused(self, path: str, body: Any, parameter: str | None, status: int = 400) -> str:
        """The message of a request that must be refused, with its ``param`` checked."""
        response = await self.post(path, body)
        assert response.status_code == status, (body, response.text)
        error = response.json()["error"]
        assert error["code"] == status
        assert error["param"] == parameter, (body, error)
        assert error["message"]
        assert response.headers["x-request-id"]
        return error["message"]

    async def refused_at_once(self, path: str, body: Any, parameter: str) -> str:
        """``refused`` in 50 ms of processor time, that of all threads; other users of the machine do not count.

        The least of three tries: no more does a garbage collection.
        """
        spent_s = []
        message = ""
        for _ in range(3):
            began_s = time.process_time()
            message = await self.refused(path, body, parameter)
            spent_s.append(time.process_time() - began_s)
        assert min(spent_s) < 0.05
        return message


def _ok(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return response.json()


def events(text: str) -> list[dict[str, Any]]:
    """The objects of an event stream."""
    frames = text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


def joined(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice of a stream."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


@contextlib.contextmanager
def serving(app: Any, **options: Any) -> Iterator[str]:
    """A real server with ``app`` on a free port, in a thread; gives its URL. ``options`` are uvicorn's."""
    as_serve_has_it = {"http": BoundedProtocol, "ws": "none"} | options
    # uvicorn's own set-up of the log would close the handlers of others, and with absl's the stream pytest captures.
    config = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1, **as_serve_has_it)
    server = uvicorn.Server(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        wait_for(lambda: server.started)
        try:
            yield f"http{'s' if config.is_ssl else ''}://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Waits until ``condition`` holds; fails the test if it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)
