"""Clients that go away, read slowly or send half a body, over real sockets."""

from __future__ import annotations

import concurrent.futures
import json
import socket
import time
from urllib.parse import urlsplit

import httpx
import pytest
from api_client import serving, wait_for
from fake_engine import FakeEngine

from jaxpage.server.app import create_app

ENDLESS = {"prompt": "Hi", "max_tokens": 4000, "ignore_eos": True}


@pytest.fixture
def endless(bytes_tokenizer):
    """An engine that goes on for 4,000 tokens of 5 ms."""
    engine = FakeEngine(bytes_tokenizer, [120] * 5000, max_model_len=5000)
    engine.step_s = 0.005
    return engine


def raw_post(url: str, body: bytes, length: int | None = None) -> socket.socket:
    """A socket that has sent a completions request and read nothing."""
    address = urlsplit(url)
    client = socket.create_connection((address.hostname, address.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length or len(body)}\r\n"
    client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
    return client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["Hi", ["Hi", "You"]])
def test_abt_1_client_goes_away(endless, stream, prompt):
    app = create_app(endless)
    body = json.dumps(ENDLESS | {"stream": stream, "prompt": prompt, "n": 2}).encode()
    with serving(app) as url:
        for _ in range(5):
            client = raw_post(url, body)
            wait_for(lambda: bool(endless.running))
            if stream:
                assert b"200 OK" in client.recv(1000)
            client.close()
            wait_for(lambda: not endless.running)
            wait_for(lambda: app.state.server.num_in_flight == 0)
        assert len(endless.aborted) == 5 * (1 if prompt == "Hi" else 2)
        answer = httpx.post(url + "/v1/completions", json={"prompt": "Hi", "max_tokens": 2})
        assert answer.json()["choices"][0]["text"] == "xx"


def test_val_4_val_4b_equal_and_odd_request_ids_do_not_meet(endless):
    with serving(create_app(endless)) as url:
        gone = raw_post(url, json.dumps(ENDLESS | {"request_id": "abc"}).encode())
        wait_for(lambda: bool(endless.running))

        def post(request_id: str) -> dict:
            body = {"prompt": "Hi", "max_tokens": 20, "n": 2, "request_id": request_id}
            return httpx.post(url + "/v1/completions", json=body).json()

        with concurrent.futures.ThreadPoolExecutor() as threads:
            answers = threads.map(post, ["abc", "abc", "abc-0", "0_abc", "cmpl-abc"])
            time.sleep(0.03)
            gone.close()
            for answer in answers:
                assert [choice["text"] for choice in answer["choices"]] == ["x" * 20] * 2
        wait_for(lambda: not endless.running)
        assert len(endless.aborted) == 1


def test_abt_1b_a_reader_that_does_not_read_slows_only_itself(endless):
    endless.step_s = 0
    endless.max_model_len = 50_000
    endless.script = lambda prompt, sample: [120] * 40_000
    with serving(create_app(endless)) as url:
        slow = raw_post(url, json.dumps(ENDLESS | {"max_tokens": 40_000, "stream": True}).encode())
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wait_for(lambda: bool(endless.running))
        body = {"prompt": "Hi", "max_tokens": 50}
        for _ in range(4):
            start = time.monotonic()
            assert httpx.post(url + "/v1/completions", json=body).status_code == 200
            assert time.monotonic() - start < 2
        time.sleep(0.3)
        assert endless.running, "the engine ran ahead of a reader that does not read"
        slow.close()
        wait_for(lambda: not endless.running)


def test_abt_1c_storm_of_disconnects(endless):
    app = create_app(endless)
    body = json.dumps(ENDLESS | {"stream": True, "n": 2}).encode()
    with serving(app) as url:
        clients = [raw_post(url, body[: len(body) // (1 + index % 2)], len(body)) for index in range(100)]
        for client in clients:
            client.close()
        answer = httpx.post(url + "/v1/completions", json={"prompt": "Hi", "max_tokens": 2})
        assert answer.status_code == 200
        wait_for(lambda: not endless.running and app.state.server.num_in_flight == 0)


def test_load_counts_requests_in_flight(endless):
    with serving(create_app(endless)) as url:
        assert httpx.get(url + "/load").json() == {"server_load": 0}
        client = raw_post(url, json.dumps(ENDLESS | {"stream": True}).encode())
        wait_for(lambda: httpx.get(url + "/load").json() == {"server_load": 1})
        client.close()
        wait_for(lambda: httpx.get(url + "/load").json() == {"server_load": 0})


def test_fe_1_huge_texts_do_not_freeze_the_server(endless):
    message = [{"role": "user", "content": "x" * 5_000_000}]
    with serving(create_app(endless)) as url, concurrent.futures.ThreadPoolExecutor() as threads:
        chats = [threads.submit(httpx.post, url + "/v1/chat/completions", json={"messages": message}) for _ in range(3)]
        tokens = [threads.submit(httpx.post, url + "/tokenize", json={"prompt": "ab " * 60_000}) for _ in range(4)]
        slowest = 0.0
        while not all(work.done() for work in (*chats, *tokens)):
            start = time.monotonic()
            assert httpx.get(url + "/health").status_code == 200
            slowest = max(slowest, time.monotonic() - start)
        assert slowest < 2.0
        assert {work.result().status_code for work in chats} == {400}
        assert {work.result().status_code for work in tokens} == {200}
