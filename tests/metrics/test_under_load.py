"""The metrics of a server with a real engine: read while it works, they fit together, and with what it answers."""

from __future__ import annotations

import asyncio
import logging
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from scrapes import Scrape, by_label, check_idle

from jaxpage import AsyncLLMEngine
from jaxpage.engine.replicas import local

sys.path.append(str(Path(__file__).parents[1] / "server"))
from api_client import Api

if TYPE_CHECKING:
    from jaxpage import LLM

IDLE_S = 1.0
"""Time in which the engine has to be idle again when all clients have left."""


@pytest.fixture
def engine(tiny: LLM) -> Iterator[AsyncLLMEngine]:
    front = AsyncLLMEngine(tiny.engine)
    yield front
    front.shutdown()


async def scrape(api: Api) -> Scrape:
    return Scrape((await api.client.get("/metrics")).content)


async def until_idle(api: Api) -> Scrape:
    async with asyncio.timeout(IDLE_S):
        while (page := await scrape(api))["num_requests_running"] + page["num_requests_waiting"]:
            await asyncio.sleep(0.01)
    check_idle(page)
    return page


def call(seed: int) -> dict[str, Any]:
    """A call of one kind or another, some long enough for the pool to be short."""
    draw = random.Random(seed)
    body: dict[str, Any] = {
        "prompt": ["x" * draw.randint(1, 90) for _ in range(draw.choice((1, 1, 2)))],
        "max_tokens": draw.randint(1, 30),
        "n": draw.choice((1, 1, 3)),
        "seed": seed,
        "ignore_eos": draw.random() < 0.5,
    }
    if draw.random() < 0.15:
        body |= {"use_beam_search": True, "n": 2}
        del body["seed"]
    elif draw.random() < 0.15:
        body |= {"echo": True, "max_tokens": 0, "n": 1}
    return body


def test_always_under_load(engine: AsyncLLMEngine) -> None:
    async def go() -> None:
        api = Api(engine)  # type: ignore[arg-type]
        before = await scrape(api)
        accepted = engine.metrics.read().num_accepted
        answers: list[dict[str, Any]] = []

        async def client(number: int) -> None:
            for each in range(4):
                answers.append(await api.complete(**call(100 * number + each)))

        clients = [asyncio.create_task(client(number)) for number in range(12)]
        pages = [before]
        while not all(task.done() for task in clients):
            for _ in range(5):  # reading a page takes the time of many steps
                numbers = engine.metrics.read()
                there = numbers.counts.num_running + numbers.counts.num_waiting
                assert sum(numbers.num_ended.values()) + there == numbers.num_accepted
                await asyncio.sleep(0.01)
            pages.append(await scrape(api))
            pages[-1].since(pages[-2])
        await asyncio.gather(*clients)
        moved = (await until_idle(api)).since(before)
        assert len(pages) > 2
        usage = [answer["usage"] for answer in answers]
        assert moved["prompt_tokens_total"] == sum(each["prompt_tokens"] for each in usage)
        cached = sum(each["prompt_tokens_details"]["cached_tokens"] for each in usage)
        assert moved.get("prefix_cache_hits_total", 0) == moved.get("prompt_tokens_cached_total", 0) == cached > 0
        completions = sum(each["completion_tokens"] for each in usage)
        assert moved["generation_tokens_total"] == moved["request_generation_tokens_sum"] == completions
        reasons = by_label(Scrape((await api.client.get("/metrics")).content), "request_success_total")
        ended = sum(reasons.values()) - sum(by_label(before, "request_success_total").values())
        assert ended == engine.metrics.read().num_accepted - accepted
        assert moved["e2e_request_latency_seconds_count"] == moved["request_params_n_count"]

    asyncio.run(go())


def test_h_clients_that_leave(engine: AsyncLLMEngine) -> None:
    async def go() -> None:
        api = Api(engine)  # type: ignore[arg-type]
        before = await scrape(api)
        body = {"prompt": "leave", "max_tokens": 100, "ignore_eos": True, "stream": True}
        tasks = [asyncio.create_task(api.post("/v1/completions", body)) for _ in range(3)]
        async with asyncio.timeout(20):
            while (page := await scrape(api))["num_requests_running"] < 3 or not page.since(before).get(
                "generation_tokens_total"
            ):
                await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        moved = (await until_idle(api)).since(before)
        assert moved['request_success_total{finished_reason="abort"}'] == 3
        assert "e2e_request_latency_seconds_count" not in moved and "request_generation_tokens_count" not in moved

    asyncio.run(go())


def test_status_lines_and_requests_in_the_log(
    engine: AsyncLLMEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(local, "STATUS_INTERVAL_S", 0.0)
    monkeypatch.setattr(engine.group.engines[0].engine.args, "enable_log_requests", True)
    caplog.set_level(logging.INFO, "jaxpage")

    async def go() -> None:
        api = Api(engine)  # type: ignore[arg-type]
        body = {"prompt": "log", "max_tokens": 3, "ignore_eos": True}
        assert (await api.post("/v1/completions", body, headers={"X-Request-Id": "my-id"})).status_code == 200

    asyncio.run(go())
    lines = [record for record in caplog.records if record.getMessage().startswith("running 1, waiting 0 (swapped 0)")]
    assert lines and lines[0].num_running == 1  # type: ignore[attr-defined]
    requests = [record for record in caplog.records if record.getMessage().startswith("request ")]
    assert [record.getMessage().partition(":my-id")[2][:8] for record in requests] == [": 2 prom", " ended: "]
    assert all(record.request_id.endswith(":my-id") for record in requests)  # type: ignore[attr-defined]


def test_the_time_before_the_engine_counts_as_queue(
    engine: AsyncLLMEngine, monkeypatch: pytest.MonkeyPatch, scrape: Callable[[Any], Scrape], tiny: LLM
) -> None:
    """A prompt arrives when ``generate`` is called, though it reaches the engine later."""
    before = engine.metrics.read().histograms.request_queue_time_seconds.total
    monkeypatch.setattr(
        type(engine.group.engines[0].engine), "check", _slowed(type(engine.group.engines[0].engine).check, 0.2)
    )

    async def go() -> None:
        api = Api(engine)  # type: ignore[arg-type]
        await api.complete(prompt="slow", max_tokens=1)

    asyncio.run(go())
    assert engine.metrics.read().histograms.request_queue_time_seconds.total - before >= 0.2


def _slowed(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    import time

    def slow(*arguments: Any) -> Any:
        time.sleep(seconds)
        return function(*arguments)

    return slow
