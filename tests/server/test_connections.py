"""What connections may do before there is a request: slow, endless or malformed headers."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from urllib.parse import urlsplit

import pytest
from api_client import serving, wait_for

from jaxpage.server import connections
from jaxpage.server.app import create_app

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"


def connect(url: str) -> socket.socket:
    address = urlsplit(url)
    return socket.create_connection((address.hostname, address.port), timeout=10)


def read_all(client: socket.socket) -> bytes:
    received = b""
    while data := client.recv(65536):
        received += data
    return received


def refusal(client: socket.socket) -> tuple[int, dict]:
    """Status and error of the last answer of a connection that gets closed."""
    head, _, body = read_all(client).partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize("sent", [b"", b"GET /", GET, GET + b"X-Slow: a"])
def test_a_client_that_trickles_headers_is_cut_off(engine, monkeypatch, sent):
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 0.3)
    with serving(create_app(engine)) as url, connect(url) as client:
        start = time.monotonic()
        client.sendall(sent)
        client.settimeout(0.1)
        with pytest.raises(TimeoutError):
            client.recv(1)
        client.settimeout(10)
        if sent:
            client.sendall(b"\r\nX-Y: b" if sent.startswith(GET) else sent[:1])  # signs of life buy no time
        assert read_all(client) == b""
        assert time.monotonic() - start < 5


def test_the_clock_stops_with_the_headers_and_starts_with_the_next_request(engine, monkeypatch):
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 0.3)
    engine.step_s = 0.15
    body = b'{"prompt": "Hi", "max_tokens": 4}'
    head = f"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with serving(create_app(engine)) as url, connect(url) as client:
        client.sendall(head.encode() + body)  # takes longer than the headers may
        assert b"200 OK" in client.recv(65536)
        time.sleep(0.4)  # an idle connection may stay
        client.sendall(GET + b"\r\n")
        assert b"200 OK" in client.recv(65536)
        client.sendall(b"GET /he")
        assert read_all(client) == b""


@pytest.mark.parametrize(
    "piece", [b"x" * 1000, b"a: b\r\n" * 100, b"\r\nX: " + b"y" * 996], ids=["value", "many", "long"]
)
def test_endless_headers_are_refused(engine, piece):
    with serving(create_app(engine)) as url, connect(url) as client:
        client.sendall(GET + b"X-A: ")
        status = None
        for _ in range(600):
            try:
                client.sendall(piece)
            except OSError:
                break
        try:
            status, error = refusal(client)
        except OSError:
            pass  # it was closed while we were still sending, and the answer was lost
        else:
            assert (status, error["code"]) == (431, 431)
        assert status in (None, 431)


def test_headers_of_a_fitting_size_pass_and_so_do_large_bodies(engine):
    body = b'{"prompt": "Hi"}'.ljust(300_000)
    head = f"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    with serving(create_app(engine)) as url, connect(url) as client:
        client.sendall(head.encode() + b"X-A: " + b"x" * 50_000 + b"\r\n\r\n" + body)
        assert b"200 OK" in client.recv(65536)


def test_endless_trailers_are_refused(engine):
    """They come after the body, so that an answer may be due: the connection is only closed."""
    app = create_app(engine)
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    with serving(app) as url, connect(url) as client:
        with contextlib.suppress(OSError):
            client.sendall(head + b"2\r\n{}\r\n0\r\n" + (b"X-T: " + b"y" * 995 + b"\r\n") * 200)
            assert read_all(client) == b""
        wait_for(lambda: app.state.server.num_in_flight == 0)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01",
        b"GET /health HTTP/1.1\r\nHost x\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        b"POST /tokenize HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
def test_what_is_no_http_gets_an_error_body(engine, sent):
    with serving(create_app(engine)) as url, connect(url) as client:
        client.sendall(sent)
        status, error = refusal(client)
        assert (status, error["code"], error["type"]) == (400, 400, "BadRequestError")


@pytest.mark.parametrize("value", [b"a\rb", b"a\x00b", b"a\nX-Evil: 1"])
def test_val_4a_a_request_id_cannot_bring_headers_along(engine, value):
    with serving(create_app(engine)) as url, connect(url) as client:
        client.sendall(GET + b"Connection: close\r\nX-Request-Id: " + value + b"\r\n\r\n")
        head = read_all(client).lower()
        assert b"x-evil" not in head
        assert head.count(b"x-request-id") <= 1
