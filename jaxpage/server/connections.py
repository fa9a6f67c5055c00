"""Owns what a connection may send before a request is there: how long its headers take and how large they are.

It must not know requests.
"""

from __future__ import annotations

import http
from asyncio import TimerHandle, Transport

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jaxpage.server.errors import ApiError, error_response

HEADER_TIMEOUT_S = 30.0
"""Time for the headers of a request, from its first byte on, or from the connection's start."""
MAX_HEADER_BYTES = 64 * 1024


class BoundedProtocol(HttpToolsProtocol):
    """Uvicorn's fast HTTP/1.1 protocol, which by itself waits for headers for ever and takes any amount of them.

    Body bytes are no concern of it: whoever reads the body limits them.
    """

    _deadline: TimerHandle | None = None
    _num_header_bytes = 0
    """Bytes that came since the last body or end of headers: headers, trailers and what frames chunks."""

    def connection_made(self, transport: Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._num_header_bytes += len(data)
        super().data_received(data)
        if self._num_header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._refuse(431, f"the headers are larger than {MAX_HEADER_BYTES} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._start_clock()

    def on_headers_complete(self) -> None:
        self._stop_clock()
        self._num_header_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_header_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_header_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP gets the same error body as everything else."""
        self._refuse(400, "the request is not valid HTTP")

    def _start_clock(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_TIMEOUT_S, self._give_up)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        if self.cycle is None or self.cycle.response_complete:  # else it would land in another request's answer
            answer = error_response(ApiError(status, message, headers={"Connection": "close"}))
            lines = [f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}".encode()]
            lines += [name + b": " + value for name, value in answer.raw_headers]
            self.transport.write(b"\r\n".join([*lines, b"", bytes(answer.body)]))
        self.transport.close()
