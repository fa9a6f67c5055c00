"""Calls an ASGI app in this process, without a socket. Knows nothing of what the app does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from starlette.applications import Starlette
from starlette.types import Message


class AppClient:
    """POSTs JSON to an app, as a client of its server would."""

    def __init__(self, app: Starlette) -> None:
        self._app = app

    @contextlib.asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None]:
        """Starts and stops what the app has in its lifespan."""
        async with self._app.router.lifespan_context(self._app):
            yield

    async def post(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the answer; cancelling it looks to the app like a client that goes away."""
        sent: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        answered = asyncio.Event()
        status, found, pieces = 0, {}, []

        async def receive() -> Message:
            if sent:
                return sent.pop()
            await answered.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status, found
            if message["type"] == "http.response.start":
                status = message["status"]
                found = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
            elif message["type"] == "http.response.body":
                pieces.append(message.get("body", b""))
                if not message.get("more_body"):
                    answered.set()

        await self._app(_scope(path, body, headers), receive, send)
        return status, found, b"".join(pieces)


def _scope(path: str, body: bytes, headers: dict[str, str]) -> dict[str, Any]:
    given = {"host": "localhost", "content-type": "application/json", "content-length": str(len(body)), **headers}
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in given.items()],
        "client": ("127.0.0.1", 0),
        "server": ("localhost", 80),
        "state": {},
    }
