"""Owns the wire side of generating: event-stream frames and giving up when the client goes away.

It must not know what is in the objects it sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from jaxpage.server.errors import ClientGoneError, error_body, to_api_error

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
_encode = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode
Result = TypeVar("Result")
SendPiece = Callable[[bytes], Awaitable[None]]


def _text(value: dict[str, Any]) -> str:
    """JSON of printable ASCII only, so that no splitter of lines can break it."""
    return _encode(value).replace("\x7f", "\\u007f")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of ``work``, which is cancelled when the client closes the connection. The body must be read before.

    Raises:
        ClientGoneError: if the client was gone first.
    """
    watching = asyncio.current_task()
    assert watching is not None, "the server runs calls in tasks"
    is_watching, is_done = True, False

    def stop_watching(working: asyncio.Task[Result]) -> None:
        nonlocal is_done
        is_done = True
        if is_watching:
            watching.cancel()

    # Of the two tasks it is the new one that works, since it wakes up for every token: between it and the event loop
    # there are none of the layers that the call came through.
    working = asyncio.ensure_future(work)
    working.add_done_callback(stop_watching)
    try:
        while (await receive())["type"] != "http.disconnect":
            pass
    except asyncio.CancelledError:
        if not is_done or watching.uncancel() > 0:  # somebody cancelled the whole call
            raise
    finally:
        is_watching = False
        if not working.done():
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
    if working.cancelled():
        raise ClientGoneError
    return working.result()


class EventStream:
    """An ASGI response that sends each object of ``events`` as it comes, then ``[DONE]``.

    A slow reader makes ``send`` wait and so slows down its own events only. An error after the first byte is sent
    as an object of the stream.

    Args:
        envelope: fields that each object begins with, before those that its event has.
        keep_alive_s: silence after which a comment line is sent, for proxies that close silent connections.
    """

    def __init__(
        self,
        events: AsyncGenerator[dict[str, Any]],
        envelope: dict[str, Any] | None = None,
        keep_alive_s: float | None = None,
    ) -> None:
        self._events = events
        self._head = b"data: " + (_text(envelope)[:-1] + "," if envelope else "{").encode()
        self._keep_alive_s = keep_alive_s
        self._last_sent_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await while_connected(receive, self._send_all(scope["state"]["send_body"]))

    async def _send_all(self, send: Send) -> None:
        async def send_piece(data: bytes, more: bool = True) -> None:
            self._last_sent_s = time.monotonic()
            try:
                await send({"type": "http.response.body", "body": data, "more_body": more})
            except OSError:
                raise ClientGoneError from None

        if self._keep_alive_s is None:
            await self._send_events(send_piece)
        else:
            waking = asyncio.ensure_future(self._keep_awake(send_piece, self._keep_alive_s))
            try:
                await self._send_events(send_piece)
            finally:
                waking.cancel()
        await send_piece(DONE, more=False)

    async def _send_events(self, send_piece: SendPiece) -> None:
        async with contextlib.aclosing(self._events) as events:
            try:
                async for event in events:
                    await send_piece(self._head + _text(event)[1:].encode() + b"\n\n")
            except ClientGoneError:
                raise
            except Exception as error:
                await send_piece(b"data: " + _text(error_body(to_api_error(error))).encode() + b"\n\n")

    async def _keep_awake(self, send_piece: SendPiece, interval_s: float) -> None:
        self._last_sent_s = time.monotonic()
        with contextlib.suppress(ClientGoneError):  # the stream itself notices, too
            while True:
                due_s = self._last_sent_s + interval_s - time.monotonic()
                if due_s > 0:
                    await asyncio.sleep(due_s)
                else:
                    await send_piece(KEEP_ALIVE)
