"""HTTP/1.1 requests to one server over kept connections; bodies arrive in pieces, with the time of each.

It must not know what the bodies mean.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import ssl
import time
import urllib.parse
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httptools

from jaxpage.errors import ParameterError, shown

Result = TypeVar("Result")
OnPiece = Callable[[bytes, float], None]
CLOSE_TIMEOUT_S = 1.0
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """``asyncio.run`` on uvloop where it is there, which halves what a piece costs."""
    if importlib.util.find_spec("uvloop") is None:
        return asyncio.run(main)
    import uvloop

    return uvloop.run(main)


class ServerError(RuntimeError):
    """The server cannot be reached, breaks off or refuses; the message is one line for people.

    Attributes:
        status: of the answer; None if there was none.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(" ".join(message.split()))
        self.status = status


@dataclass
class Response:
    """An answer; ``body`` stays empty where its pieces were given to a callback."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def json(self) -> dict[str, Any]:
        """The object in a good answer.

        Raises:
            ServerError: for an error status, with the server's message, and for anything that is not a JSON object.
        """
        self.raise_for_status()
        try:
            value = json.loads(self.body)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise ServerError(f"the server's answer is no JSON object: {shown(self.body)}", self.status)
        return value

    def raise_for_status(self) -> None:
        """Raises ServerError with the server's own message unless the status is 200."""
        if self.status != 200:
            raise ServerError(f"HTTP {self.status}: {error_message(self.body)}", self.status)


def error_message(body: bytes) -> str:
    """What an error body says: OpenAI's form, or the first 200 bytes of whatever it is."""
    try:
        value = json.loads(body)
    except ValueError:
        value = None
    error = value.get("error") if isinstance(value, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else shown(body.decode(errors="replace")[:200])


class HttpClient:
    """Requests to one server. As many connections as requests are in flight; idle ones are used again.

    Args:
        url: ``http://`` or ``https://``, with a path in front of all paths if need be; or ``unix:PATH`` of a socket.
        headers: sent with every request.
        insecure: take any certificate.
        connect_timeout_s: longest wait for a connection.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        *,
        insecure: bool = False,
        connect_timeout_s: float = 30,
    ) -> None:
        parts = check_url("url", url)
        self._is_unix = parts.scheme == "unix"
        self._host, self._path = parts.hostname or "localhost", parts.path if self._is_unix else parts.path.rstrip("/")
        self._ssl = ssl_context(insecure) if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        fixed = {"host": parts.netloc.rpartition("@")[2] or "localhost", **(headers or {})}
        self._head = "".join(f"{name}: {_checked_header(name, value)}\r\n" for name, value in fixed.items())
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[_Connection] = []
        self.url = url

    async def get(self, path: str) -> Response:
        """GET, the whole answer."""
        return await self.request("GET", path)

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Response:
        """POST of a JSON value, the whole answer."""
        return await self.request("POST", path, json.dumps(body).encode(), headers)

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        on_piece: OnPiece | None = None,
        timeout_s: float | None = None,
    ) -> Response:
        """Sends a request and waits for the end of its answer.

        Args:
            on_piece: gets each piece of a body with status 200 and the ``time.perf_counter`` of its arrival, at once.
            timeout_s: for all of it; None waits for ever.

        Raises:
            ServerError: no connection, an answer that breaks off or is no HTTP, or time is up.
        """
        prefix = "" if self._is_unix else self._path
        extra = "".join(f"{name}: {_checked_header(name, value)}\r\n" for name, value in (headers or {}).items())
        head = f"{method} {prefix}{path} HTTP/1.1\r\n{self._head}{extra}"
        if method == "POST":
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        message = head.encode("latin-1") + b"\r\n" + body
        try:
            async with asyncio.timeout(timeout_s):
                return await self._exchange(message, on_piece)
        except TimeoutError:
            raise ServerError(f"no complete answer within {timeout_s:g} s") from None

    async def _exchange(self, message: bytes, on_piece: OnPiece | None) -> Response:
        while True:
            was_used = bool(self._idle)
            connection = self._idle.pop() if was_used else await self._connect()
            try:
                response = await connection.exchange(message, on_piece)
            except _ConnectionGone:
                # The server may close an idle connection just when it is used again: not this request's fault.
                if was_used:
                    continue
                raise
            finally:
                connection.release(self._idle)
            return response

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                if self._is_unix:
                    _, connection = await loop.create_unix_connection(_Connection, self._path)
                else:
                    _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._ssl)
        except TimeoutError:
            raise ServerError(f"no connection to {self.url} within {self._connect_timeout_s:g} s") from None
        except OSError as error:
            reason = "connection refused" if isinstance(error, ConnectionRefusedError) else error.strerror or str(error)
            raise ServerError(f"cannot connect to {self.url}: {reason}") from None
        return connection

    async def close(self) -> None:
        """Closes what is idle, and waits until it is: TLS says good-bye first."""
        closing, self._idle[:] = list(self._idle), []
        for connection in closing:
            connection.close()
        if closing:
            await asyncio.wait([connection.lost for connection in closing], timeout=CLOSE_TIMEOUT_S)

    async def __aenter__(self) -> HttpClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


class _ConnectionGone(ServerError):
    """The connection ended before the first byte of an answer."""


class _Connection(asyncio.Protocol):
    """One connection; one exchange at a time.

    Attributes:
        lost: is done once the connection is closed.
    """

    def __init__(self) -> None:
        self._transport: Any = None
        self._parser: Any = None
        self._done: asyncio.Future[None] | None = None
        self._response = Response()
        self._pieces: list[bytes] = []
        self._on_piece: OnPiece | None = None
        self._has_begun = self._is_complete = self._keeps_alive = False
        self._now = 0.0
        self.lost = asyncio.get_running_loop().create_future()

    async def exchange(self, message: bytes, on_piece: OnPiece | None) -> Response:
        if self._transport.is_closing():
            raise _ConnectionGone("the server closed the connection")
        self._parser = httptools.HttpResponseParser(self)
        self._response, self._pieces, self._on_piece = Response(), [], on_piece
        self._has_begun = self._is_complete = self._keeps_alive = False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        await self._done
        self._response.body = b"".join(self._pieces)
        return self._response

    def release(self, idle: list[_Connection]) -> None:
        """Keeps the connection for the next request if the last answer was complete; else closes it."""
        if self._is_complete and self._keeps_alive and not self._transport.is_closing():
            idle.append(self)
        else:
            self.close()

    def close(self) -> None:
        self._transport.close()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._done is None or self._done.done():
            self.close()  # bytes that nobody asked for
            return
        self._has_begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            cause = error.__context__  # what a callback raised, which the parser wraps
            self._fail(cause if isinstance(cause, Exception) else ServerError(f"the answer is not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(None)
        if self._done is None or self._done.done():
            return
        if not self._has_begun:
            self._fail(_ConnectionGone("the server closed the connection without an answer"))
        elif "content-length" in self._response.headers or "transfer-encoding" in self._response.headers:
            self._fail(ServerError("the server closed the connection in mid-answer"))
        else:
            self.on_message_complete()  # an answer without a length ends with its connection

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._response.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._on_piece is not None and self._response.status == 200:
            self._on_piece(body, self._now)
        else:
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        self._is_complete = True
        self._keeps_alive = self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        self.close()


def check_url(name: str, url: str) -> urllib.parse.SplitResult:
    """The parts of a server's address; raises ParameterError under ``name`` if it is none."""
    wrong = ParameterError(name, f"must be http://HOST[:PORT], https://... or unix:PATH, got {shown(url)}")
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:
        raise wrong from None
    is_http = parts.scheme in ("http", "https") and bool(parts.hostname) and re.fullmatch("[!-~]+", url)
    if not is_http and not (parts.scheme == "unix" and parts.path):
        raise wrong
    try:
        _ = parts.port
    except ValueError:
        raise ParameterError(name, f"has no valid port: {shown(url)}") from None
    return parts


def ssl_context(insecure: bool) -> ssl.SSLContext:
    """The system's certificates, or none at all."""
    context = ssl.create_default_context()
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def authorization(api_key: str | None) -> dict[str, str]:
    """The header for a key; without one, for what ``$OPENAI_API_KEY`` holds.

    Raises:
        ParameterError: for a key that no header can hold; the message does not show it.
    """
    key = api_key or os.environ.get("OPENAI_API_KEY")
    if key and not all("!" <= letter <= "~" for letter in key):
        raise ParameterError("api_key", "must be visible ASCII characters (nor may $OPENAI_API_KEY hold others)")
    return {"authorization": f"Bearer {key}"} if key else {}


def _checked_header(name: str, value: str) -> str:
    if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
        raise ParameterError("header", f"is not valid: {shown(f'{name}: {value}')}")
    return value
