"""The HTTP client: connections kept and lost, answers whole, in pieces and broken."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from jaxpage.client import HttpClient, ServerError, run, stream_events
from jaxpage.client.http import authorization, error_message
from jaxpage.errors import ParameterError

Answer = Callable[[bytes], bytes | None]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


class Server:
    """Sends what it is told to for each request; None closes the connection without an answer."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.num_connections = 0
        self.requests: list[bytes] = []
        self.handlers: list[asyncio.Task[None]] = []

    def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.handlers.append(asyncio.create_task(self._handle(reader, writer)))

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
                body = await reader.readexactly(int(length or 0))
                self.requests.append(head + body)
                answer = self.answer(head)
                if answer is None:
                    break
                writer.write(answer)
                if b"content-length" not in answer and b"chunked" not in answer:
                    break
                if answer.endswith(b"CUT"):
                    break
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def end(self) -> None:
        """Waits until every connection is closed: the client has to have done so."""
        async with asyncio.timeout(5):
            await asyncio.gather(*self.handlers)


def with_server(answer: Answer, test: Callable[[Server, HttpClient], Awaitable[None]], prefix: str = "") -> None:
    async def main() -> None:
        server = Server(answer)
        listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        async with HttpClient(f"http://127.0.0.1:{port}{prefix}", {"x-test": "1"}) as client:
            await test(server, client)
        await server.end()
        listener.close()

    asyncio.run(main())


def test_requests_carry_their_headers_and_the_connection_is_kept() -> None:
    async def test(server: Server, client: HttpClient) -> None:
        assert (await client.get("/a")).json() == {}
        assert (await client.post("/b", {"k": "é"}, {"x-more": "2"})).json() == {}
        assert server.num_connections == 1
        assert server.requests[0].startswith(b"GET /base/a HTTP/1.1\r\nhost: 127.0.0.1:")
        assert b"\r\nx-test: 1\r\n" in server.requests[0]
        assert b"\r\nx-more: 2\r\n" in server.requests[1]
        assert server.requests[1].endswith(b'\r\n\r\n{"k": "\\u00e9"}')

    with_server(lambda head: OK, test, prefix="/base/")


def test_requests_at_once_have_connections_of_their_own() -> None:
    async def test(server: Server, client: HttpClient) -> None:
        await asyncio.gather(*[client.get("/") for _ in range(5)])
        assert server.num_connections == 5
        await asyncio.gather(*[client.get("/") for _ in range(5)])
        assert server.num_connections == 5

    with_server(lambda head: OK, test)


def test_an_idle_connection_that_the_server_closes_is_replaced() -> None:
    answers = iter([OK, None, OK])

    async def test(server: Server, client: HttpClient) -> None:
        await client.get("/")
        assert (await client.get("/")).status == 200  # sent twice: the first time into a closed connection
        assert server.num_connections == 2

    with_server(lambda head: next(answers), test)


def test_a_fresh_connection_without_an_answer_is_an_error() -> None:
    async def test(server: Server, client: HttpClient) -> None:
        with pytest.raises(ServerError, match="without an answer"):
            await client.get("/")
        assert server.num_connections == 1

    with_server(lambda head: None, test)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nCUT", "in mid-answer"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\nCUT", "in mid-answer|not HTTP"),
        (b"SMTP hello content-length CUT", "not HTTP"),
    ],
)
def test_broken_answers(answer: bytes, message: str) -> None:
    async def test(server: Server, client: HttpClient) -> None:
        with pytest.raises(ServerError, match=message):
            await client.get("/")

    with_server(lambda head: answer, test)


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    async def test(server: Server, client: HttpClient) -> None:
        assert (await client.get("/")).body == b"all of it"

    with_server(lambda head: b"HTTP/1.1 200 OK\r\n\r\nall of it", test)


def test_errors_speak_with_the_servers_words() -> None:
    body = b'{"error": {"message": "no such model", "code": 404}}'
    answer = b"HTTP/1.1 404 Not Found\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)

    async def test(server: Server, client: HttpClient) -> None:
        pieces: list[bytes] = []
        response = await client.request("POST", "/", b"{}", on_piece=lambda piece, at: pieces.append(piece))
        assert not pieces, "an error body is no stream"
        with pytest.raises(ServerError, match=r"^HTTP 404: no such model$") as raised:
            response.raise_for_status()
        assert raised.value.status == 404

    with_server(lambda head: answer, test)


def test_bodies_that_are_no_errors_of_openai() -> None:
    assert error_message(b'{"error": "plain"}') == "plain"
    assert error_message(b"<html>" + b"x" * 500) == "'<html>" + "x" * 190 + "..."


def test_silence_ends_with_the_timeout() -> None:
    async def test(server: Server, client: HttpClient) -> None:
        with pytest.raises(ServerError, match=r"no complete answer within 0\.05 s"):
            await client.request("GET", "/", timeout_s=0.05)

    with_server(lambda head: b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", test)


def test_nobody_listens() -> None:
    async def main() -> None:
        async with HttpClient("http://127.0.0.1:1") as client:
            with pytest.raises(ServerError, match=r"cannot connect to http://127\.0\.0\.1:1: connection refused"):
                await client.get("/")

    run(main())


def test_unix_sockets(tmp_path: Path) -> None:
    async def main() -> None:
        server = Server(lambda head: OK)
        listener = await asyncio.start_unix_server(server.handle, tmp_path / "s")
        async with HttpClient(f"unix:{tmp_path}/s") as client:
            assert (await client.get("/v1/models")).status == 200
        assert server.requests[0].startswith(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n")
        await server.end()
        listener.close()

    asyncio.run(main())


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:port"])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ParameterError, match=r"^url: "):
        HttpClient(url)


def test_headers_cannot_smuggle() -> None:
    with pytest.raises(ParameterError, match=r"^header: "):
        HttpClient("http://x", {"a": "1\r\nb: 2"})


def test_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert authorization(None) == {}
    monkeypatch.setenv("OPENAI_API_KEY", "env")
    assert authorization(None) == {"authorization": "Bearer env"}
    assert authorization("given") == {"authorization": "Bearer given"}


def chunked(text: str) -> bytes:
    body = text.encode()
    return (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        + b"".join(b"%x\r\n%s\r\n" % (1, body[at : at + 1]) for at in range(len(body)))
        + b"0\r\n\r\n"
    )


async def collect(events: AsyncIterator[dict[str, object]]) -> list[dict[str, object]]:
    return [event async for event in events]


def test_events_in_single_bytes() -> None:
    text = ': a comment\n\ndata: {"a": 1}\n\nevent: x\r\ndata:{"b": "é"}\r\n\r\ndata: [DONE]\n\n'

    async def test(server: Server, client: HttpClient) -> None:
        assert await collect(stream_events(client, "/", {})) == [{"a": 1}, {"b": "é"}]

    with_server(lambda head: chunked(text), test)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('data: {"a": 1}\n\n', r"without \[DONE\]"),
        ('data: {"a": 1}\n\ndata: {"error": {"message": "boom"}}\n\ndata: [DONE]\n\n', "error in mid-stream: boom"),
        ('data: {"a": 1}\n\ndata: [1]\n\n', "no JSON object"),
        ('data: {"a": 1}\n\ndata: {"\n\n', "no JSON object"),
    ],
)
def test_streams_that_break(text: str, message: str) -> None:
    async def test(server: Server, client: HttpClient) -> None:
        seen = []
        with pytest.raises(ServerError, match=message):
            async for event in stream_events(client, "/", {}):
                seen.append(event)
        assert seen == [{"a": 1}], "what came before is not lost"

    with_server(lambda head: chunked(text), test)


def test_leaving_a_stream_closes_its_connection() -> None:
    async def main() -> None:
        gone = asyncio.Event()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b'HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n10\r\ndata: {"a": 1}\n\n\r\n')
            assert await reader.read() == b"{}"
            writer.close()
            gone.set()

        listener = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with HttpClient(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}") as client:
            async with contextlib.aclosing(stream_events(client, "/", {})) as events:
                assert await anext(events) == {"a": 1}
            async with asyncio.timeout(5):
                await gone.wait()
        listener.close()

    asyncio.run(main())
