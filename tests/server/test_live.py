"""The stream of pictures at /live: its shape, its key, how little it asks of the engine, and how it ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from api_client import Api, serving
from fake_engine import FakeEngine

from jaxpage.errors import EngineDeadError
from jaxpage.kv.block_map import BlockState
from jaxpage.params import SamplingParams, TokensPrompt
from jaxpage.server.app import create_app
from jaxpage.server.live import MAX_CELLS, LiveView, block_map, picture, runs

if TYPE_CHECKING:
    from jaxpage import LLM, AsyncLLMEngine

pytestmark = pytest.mark.anyio


def objects(response: httpx.Response) -> Iterator[dict[str, Any] | None]:
    """The events of a stream; None for its proper end."""
    for line in response.iter_lines():
        if line:
            data = line.removeprefix("data: ")
            yield None if data == "[DONE]" else json.loads(data)


def test_the_stream_and_its_end(engine: FakeEngine) -> None:
    app = create_app(engine)
    with serving(app) as url, httpx.stream("GET", f"{url}/live") as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = objects(response)
        first, second = next(events), next(events)
        assert first is not None and second is not None
        assert first["model"] == {"name": "fake", "max_model_len": 64, "can_chat": True}
        assert first["block_size"] == 4
        assert first["blocks"] == {"usable": 15, "free": 15, "cached": 0, "used": 0, "shared": 0}
        assert first["map"] == {"blocks_per_cell": 1, "num_blocks": 16, "states": "x" + "." * 15}
        assert (first["num_running"], first["running"], first["num_waiting"], first["waiting"]) == (0, [], 0, [])
        assert first["is_draining"] is False
        assert second["time"] > first["time"]
        assert "map" not in second, "a map that has not changed is not sent again"
        app.state.server.is_draining = True
        rest = list(events)
        assert rest[-1] is None, "it must not hold up the end of the server"
        assert len(rest) <= 3


def test_the_end_of_the_engine_is_told(engine: FakeEngine) -> None:
    with serving(create_app(engine)) as url:
        with httpx.stream("GET", f"{url}/live") as response:
            events = objects(response)
            next(events)
            engine.is_dead = True
            error = next(event for event in events if event is None or "error" in event)
            assert error is not None and error["error"]["code"] == 503
        answer = httpx.get(f"{url}/live")
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "ServiceUnavailableError")


def test_nobody_watches_nothing_is_asked(engine: FakeEngine) -> None:
    app = create_app(engine)
    with serving(app) as url:
        with httpx.stream("GET", f"{url}/live") as response:
            next(objects(response))
        asyncio.run(asyncio.sleep(0.5))
        before = engine.num_snapshots
        asyncio.run(asyncio.sleep(0.6))
        assert engine.num_snapshots == before


async def test_it_takes_a_key(engine: FakeEngine) -> None:
    response = await Api(engine, api_key=("one",)).client.get("/live")
    assert (response.status_code, response.json()["error"]["type"]) == (401, "AuthenticationError")
    assert engine.num_snapshots == 0


async def test_all_watchers_share_a_picture(engine: FakeEngine) -> None:
    view = LiveView(engine, interval_s=0.05)
    first = await asyncio.gather(*(view.next() for _ in range(5)))
    assert engine.num_snapshots == 1
    assert all(each is first[0] for each in first)
    start = asyncio.get_running_loop().time()
    for _ in range(4):
        await asyncio.gather(*(view.next() for _ in range(5)))
    assert asyncio.get_running_loop().time() - start > 0.15, "no more than one per interval"
    assert engine.num_snapshots == 5


async def test_a_watcher_that_leaves_takes_nothing_from_the_others(engine: FakeEngine) -> None:
    view = LiveView(engine, interval_s=0.05)
    await view.next()
    leaving, staying = asyncio.ensure_future(view.next()), asyncio.ensure_future(view.next())
    await asyncio.sleep(0)
    leaving.cancel()
    assert (await staying)["num_running"] == 0
    assert leaving.cancelled()


async def test_a_dead_engine_fails_every_watcher(engine: FakeEngine) -> None:
    view = LiveView(engine, interval_s=0)
    engine.is_dead = True
    for _ in range(2):
        results = await asyncio.gather(view.next(), view.next(), return_exceptions=True)
        assert all(isinstance(result, EngineDeadError) for result in results)
    engine.is_dead = False
    assert (await view.next())["num_running"] == 0


def test_maps_of_large_pools_count_by_cells() -> None:
    states = bytes([BlockState.SCRATCH] + [BlockState.USED] * 4 + [BlockState.SHARED] + [BlockState.CACHED] * 3)
    states += bytes(2 * MAX_CELLS)
    shown = block_map(states)
    size = shown["blocks_per_cell"]
    assert size == 3 and shown["num_blocks"] == len(states)
    assert len(shown["used"]) == -(-len(states) // size) <= MAX_CELLS
    assert (shown["used"][:3], shown["shared"][:3], shown["cached"][:3]) == ([2, 2, 0], [0, 1, 0], [0, 0, 3])
    assert block_map(bytes(MAX_CELLS))["blocks_per_cell"] == 1


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([], []),
        ([7], [[7, 1]]),
        ([1, 2, 3, 9, 8, 7, 8], [[1, 3], [9, 1], [8, 1], [7, 2]]),
    ],
)
def test_runs_of_block_ids(ids: list[int], expected: list[list[int]]) -> None:
    assert runs(ids) == expected


@pytest.fixture
def real_engine(llm_for: Callable[..., LLM], random_model: Callable[..., Any]) -> Iterator[AsyncLLMEngine]:
    from jaxpage import AsyncLLMEngine

    engine = AsyncLLMEngine(llm_for(random_model().directory).engine)
    yield engine
    engine.shutdown()


async def test_blocks_fill_are_shared_cached_and_freed(real_engine: AsyncLLMEngine) -> None:
    params = SamplingParams(n=2, seed=1, max_tokens=20, ignore_eos=True)
    prompt = TokensPrompt(prompt_token_ids=list(range(10, 20)))  # 2.5 blocks of 4
    before = picture(await real_engine.snapshot())

    async def read_all() -> None:
        async for _ in real_engine.generate(prompt, params, "0123456789abcdef"):
            pass

    seen = []
    reading = asyncio.ensure_future(read_all())
    while not reading.done():
        seen.append(picture(await real_engine.snapshot()))
    during = [each for each in seen if each["num_running"]]
    assert before["blocks"] == {"usable": 128, "free": 128, "cached": 0, "used": 0, "shared": 0}
    assert max(each["blocks"]["shared"] for each in during) >= 2, "two samples share the full blocks of their prompt"
    both = next(each for each in during if each["num_running"] == 2)
    assert [request["id"] for request in both["running"]] == ["01234567/0", "01234567/1"]
    one, two = (
        [block for first, count in request["blocks"] for block in range(first, first + count)]
        for request in both["running"]
    )
    assert one[:2] == two[:2]
    for each in during:
        letters = each["map"]["states"]
        counts = {
            name: letters.count(letter)
            for name, letter in zip(("free", "cached", "used", "shared"), ".cus", strict=True)
        }
        assert each["blocks"] == counts | {"usable": 128}
        for request in each["running"]:
            assert sum(count for _, count in request["blocks"]) == request["num_blocks"]
    used = [each["blocks"]["used"] for each in during]
    assert used[-1] > used[0], "the answers fill blocks of their own"
    after = picture(await real_engine.snapshot())
    assert (after["blocks"]["used"], after["blocks"]["shared"], after["num_running"]) == (0, 0, 0)
    assert after["blocks"]["cached"] > 0
    assert after["totals"]["generated_tokens"] - before["totals"]["generated_tokens"] == 40
    await real_engine.reset_prefix_cache()
    assert picture(await real_engine.snapshot())["blocks"]["free"] == 128


async def test_no_picture_of_a_dead_engine(real_engine: AsyncLLMEngine) -> None:
    real_engine.shutdown()
    with pytest.raises(EngineDeadError):
        await real_engine.snapshot()
