"""Owns the wire side of generating: event-stream frames and giving up when the client goes away.

It must not know what is in the objects it sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from jaxpage.server.errors import ClientGoneError, error_body, to_api_error

DONE = b"data: [DONE]\n\n"
_encode = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode
Result = TypeVar("Result")


def frame(value: dict[str, Any]) -> bytes:
    """``value`` as one event. Only printable ASCII remains, so no splitter of lines can break it."""
    return b"data: " + _encode(value).replace("\x7f", "\\u007f").encode("ascii") + b"\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of ``work``, which is cancelled when the client closes the connection. The body must be read before.

    Raises:
        ClientGoneError: if the client was gone first.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """An ASGI response that sends each object of ``events`` as it comes, then ``[DONE]``.

    A slow reader makes ``send`` wait and so slows down its own events only. An error after the first byte is sent
    as an object of the stream.
    """

    def __init__(self, events: AsyncGenerator[dict[str, Any]]) -> None:
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await while_connected(receive, self._send_events(send))

    async def _send_events(self, send: Send) -> None:
        async def send_piece(data: bytes, more: bool = True) -> None:
            try:
                await send({"type": "http.response.body", "body": data, "more_body": more})
            except OSError:
                raise ClientGoneError from None

        async with contextlib.aclosing(self._events) as events:
            try:
                async for event in events:
                    await send_piece(frame(event))
            except ClientGoneError:
                raise
            except Exception as error:
                await send_piece(frame(error_body(to_api_error(error))))
        await send_piece(DONE, more=False)
