"""Takes a stream of server-sent events apart into the JSON objects it carries.

It must not know fields beyond ``error``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from jaxpage.client.http import HttpClient, ServerError
from jaxpage.errors import shown

OnEvent = Callable[[dict[str, Any], float], None]


class EventParser:
    """Give it the pieces of a body as they come; it calls ``on_event`` for each object, with its time of arrival.

    Attributes:
        is_done: whether ``[DONE]`` has come.
    """

    def __init__(self, on_event: OnEvent) -> None:
        self._on_event = on_event
        self._rest = b""
        self.is_done = False

    def feed(self, piece: bytes, arrived: float) -> None:
        """Raises ServerError for an error the server sends in mid-stream, or for what is no JSON object."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):  # blank lines between events, comments, and fields nobody here uses
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                self.is_done = True
                continue
            try:
                event = json.loads(data)
            except ValueError:
                event = None
            if not isinstance(event, dict):
                raise ServerError(f"the server sent an event that is no JSON object: {shown(data)}")
            if "error" in event:
                error = event["error"]
                message = error.get("message") if isinstance(error, dict) else error
                raise ServerError(f"error in mid-stream: {message}")
            self._on_event(event, arrived)


async def stream_events(
    client: HttpClient, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> AsyncGenerator[dict[str, Any]]:
    """The objects of a streamed answer as they come; leaving early closes the connection, which ends the request.

    Raises:
        ServerError: as ``HttpClient.request`` and ``EventParser.feed``, for an error status, and for a stream that
            ends without ``[DONE]``.
    """
    arrived: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    parser = EventParser(lambda event, _: arrived.put_nowait(event))

    async def read() -> None:
        try:
            response = await client.request("POST", path, json.dumps(body).encode(), headers, parser.feed)
            response.raise_for_status()
            if not parser.is_done:
                raise ServerError("the stream ended without [DONE]")
        finally:
            arrived.put_nowait(None)

    reading = asyncio.create_task(read())
    try:
        while (event := await arrived.get()) is not None:
            yield event
        await reading
    finally:
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError, ServerError):
            await reading
