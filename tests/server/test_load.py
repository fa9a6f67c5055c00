"""A real engine behind a real socket: clients that vanish in every state, and a front end that stays responsive."""

from __future__ import annotations

import concurrent.futures
import json
import socket
import statistics
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from api_client import TOKENIZERS, serving, wait_for

from jaxpage.benchmarks.http_streams import write_tiny_model
from jaxpage.benchmarks.stream_clients import probe_health, read_streams, vanish
from jaxpage.config import AsyncEngineArgs
from jaxpage.engine.async_engine import AsyncLLMEngine
from jaxpage.server.app import create_app

ENDLESS = {"prompt": [97, 98, 99], "max_tokens": 900, "ignore_eos": True, "temperature": 0, "stream": True}
GOOD = {"prompt": "Hi", "max_tokens": 4, "temperature": 0}
MAX_NUM_SEQS = 4
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLMEngine]:
    """A tiny model with random weights, four requests at a time, prompts in chunks of 16 tokens."""
    directory = tmp_path_factory.mktemp("tiny")
    tokenizer = str(TOKENIZERS / "bytes_tokenizer")
    write_tiny_model(directory, tokenizer)
    sizes: dict[str, Any] = {
        "max_model_len": 1024,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": 16,
        "block_size": 16,
    }
    names: dict[str, Any] = {
        "model": str(directory),
        "tokenizer": tokenizer,
        "load_format": "dummy",
        "served_model_name": "tiny",
    }
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**names, **sizes, num_gpu_blocks_override=300))
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def url(engine: AsyncLLMEngine) -> Iterator[str]:
    with serving(create_app(engine)) as url:
        yield url


@pytest.fixture
def address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname and parts.port
    return parts.hostname, parts.port


@pytest.fixture(autouse=True)
def nothing_is_left(engine: AsyncLLMEngine, url: str) -> Iterator[None]:
    """After every test all is as before it, within a second, and the engine serves."""
    before = httpx.post(f"{url}/v1/completions", json=GOOD).json()["choices"]
    wait_for(lambda: is_idle(engine), 1.0)
    yield
    wait_for(lambda: is_idle(engine), 1.0)
    assert httpx.post(f"{url}/v1/completions", json=GOOD).json()["choices"] == before


def is_idle(engine: AsyncLLMEngine) -> bool:
    scheduler = engine.group.engines[0].engine.core.scheduler
    return not (
        scheduler.running or scheduler.num_waiting or scheduler.kv.pool.num_used or engine.num_unfinished_requests
    )


def aborted(url: str) -> float:
    """Samples that ended because their clients went away."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    name = "jaxpage:request_success_total"
    (line,) = (line for line in lines if line.startswith(name) and 'finished_reason="abort"' in line)
    return float(line.rsplit(" ", 1)[1])


def open_stream(url: str, **body: Any) -> socket.socket:
    parts = urlsplit(url)
    client = socket.create_connection((parts.hostname, parts.port), timeout=10)
    content = json.dumps(ENDLESS | body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
    client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
    return client


def test_abt_1_fifty_streams_go_away_after_three_chunks(engine, url):
    before = aborted(url)
    for _ in range(50):
        with open_stream(url) as client:
            received = b""
            while received.count(b"data: ") < 3:
                received += client.recv(65536)
    wait_for(lambda: is_idle(engine), 1.0)
    assert aborted(url) == before + 50


def test_abt_1a_gone_while_queued_or_prefilling(engine, url):
    with open_stream(url, max_tokens=200) as running:
        others = [open_stream(url) for _ in range(MAX_NUM_SEQS - 1)]
        queued = [open_stream(url) for _ in range(10)]
        wait_for(lambda: engine.group.engines[0].engine.core.scheduler.num_waiting == 10)
        for client in (*queued, *others):
            client.close()
        wait_for(lambda: engine.group.engines[0].engine.core.scheduler.num_waiting == 0, 1.0)
        with open_stream(url, prompt=[97] * 900):
            wait_for(lambda: len(engine.group.engines[0].engine.core.scheduler.running) == 2)
        received = b""
        while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            received += running.recv(65536)
    assert b'"finish_reason":"length"' in received, "the others' leaving did it no harm"


def test_abt_1c_a_storm_of_vanishing_clients(engine, url, address):
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        probing = threads.submit(probe_health, address, 1.0)
        vanish(address, [ENDLESS | {"n": 2} for _ in range(100)], wait=False)
        wait_for(lambda: is_idle(engine), 2.0)
        probing.result()


def test_fe_1_health_and_text_while_all_slots_stream(url, address):
    """The bound is wide: this machine may be busy with other things. ``benchmarks.http_streams`` measures."""
    bodies = [ENDLESS | {"max_tokens": 100, "prompt": [97 + number % 20]} for number in range(24)]
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        probing = threads.submit(probe_health, address, 1.0)
        result = read_streams(address, bodies)
        assert statistics.median(probing.result()) < 0.1
    assert result["frames"] <= 24 * 101


def test_fe_1a_many_medium_texts_at_once(url):
    """None of them fits: they cost the front end, not the engine."""
    with open_stream(url) as client, concurrent.futures.ThreadPoolExecutor(8) as threads:
        client.recv(1)
        chats = [
            threads.submit(
                httpx.post,
                f"{url}/v1/chat/completions",
                json={"messages": [{"role": "user", "content": "ab " * 33_000}]},
            )
            for _ in range(8)
        ]
        texts = [threads.submit(httpx.post, f"{url}/tokenize", json={"prompt": "ab " * 20_000}) for _ in range(8)]
        gaps = []
        while not all(work.done() for work in (*chats, *texts)):
            began = time.monotonic()
            if not client.recv(65536).strip():
                break
            gaps.append(time.monotonic() - began)
        assert {work.result().status_code for work in chats} == {400}
        assert {work.result().status_code for work in texts} == {200}
    assert max(gaps, default=0) < 1.0
