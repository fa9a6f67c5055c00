"""Requests whose reader goes away, in a real engine: queued, prefilling, generating or unread, they leave nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from forced import ForcedModel
from schedules import recorded

from jaxpage import AsyncLLMEngine, RequestOutput, RequestOutputKind, SamplingParams

pytestmark = pytest.mark.anyio

Generator = AsyncIterator[RequestOutput]


@pytest.fixture
def model(forced_model: Callable[..., ForcedModel]) -> ForcedModel:
    model = forced_model(max_num_seqs=4, max_model_len=2048, num_gpu_blocks_override=800)
    model.says(lambda prompt, sample: [120] * 2048)
    return model


@pytest.fixture
async def engine(model: ForcedModel) -> AsyncIterator[AsyncLLMEngine]:
    """A thread over the forced engine, which must be idle again at the end."""
    front = AsyncLLMEngine(model.llm.engine)
    yield front
    await idle(front)
    front.shutdown(drain_timeout_s=5)
    pool = model.llm.engine.core.scheduler.kv.pool
    assert pool.num_free == pool.num_usable


async def idle(engine: AsyncLLMEngine, timeout_s: float = 10.0) -> None:
    """Waits until nothing runs or waits any more."""
    async with asyncio.timeout(timeout_s):
        while engine.num_unfinished_requests or engine.group.engines[0].engine.has_work:
            await asyncio.sleep(0.005)
        counts = engine.metrics.read().counts
        assert (counts.num_running, counts.num_waiting) == (0, 0)


def stream(engine: AsyncLLMEngine, name: str, prompt: list[int], max_tokens: int, **more: Any) -> Any:
    params = SamplingParams(
        temperature=0, ignore_eos=True, max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA, **more
    )
    return engine.generate({"prompt_token_ids": prompt}, params, name)


async def tokens(outputs: Generator) -> list[int]:
    return [token async for output in outputs for token in output.outputs[0].token_ids]


async def test_abt_1_the_reader_of_a_stream_goes_away(engine: AsyncLLMEngine) -> None:
    aborts = engine.metrics.read().num_ended["abort"]
    for index in range(50):
        outputs = stream(engine, f"{index}", [index] * 5, 1500)
        for _ in range(3):
            await anext(outputs)
        await outputs.aclose()
    await idle(engine, 1.0)
    assert engine.metrics.read().num_ended["abort"] == aborts + 50
    assert await tokens(stream(engine, "after", [7] * 5, 4)) == [120] * 4


async def test_abt_1a_gone_while_queued_or_prefilling(model: ForcedModel, engine: AsyncLLMEngine) -> None:
    # A token takes a millisecond, so that the long prompt is under way for half a second.
    model.says(lambda prompt, sample: time.sleep(0.001) or [120] * 2048)
    running = [asyncio.create_task(tokens(stream(engine, f"run {place}", [place] * 5, 300))) for place in range(3)]
    prefilling = stream(engine, "long", [50] * 2000, 9)
    with recorded(model.llm) as steps:
        first = asyncio.create_task(anext(prefilling))
        while not any(row.request.num_prompt_tokens == 2000 for rows in list(steps) for row in rows):
            await asyncio.sleep(0.001)
        queued = [asyncio.create_task(anext(stream(engine, f"q {place}", [60 + place] * 5, 9))) for place in range(10)]
        while engine.metrics.read().counts.num_waiting < 10:
            await asyncio.sleep(0.001)
        for task in (*queued, first):
            task.cancel()
        await asyncio.gather(*queued, first, return_exceptions=True)
        while "long" in model.llm.engine._prompts:
            await asyncio.sleep(0.001)
        gone = len(steps)
        assert engine.metrics.read().counts.num_waiting == 0
        assert await asyncio.gather(*running) == [[120] * 300] * 3
    late = [row for rows in steps[gone + 2 :] for row in rows if row.request.num_prompt_tokens == 2000]
    assert late == [], "the prefill stops within two steps"
    computed = sum(row.num_tokens for rows in steps for row in rows if row.request.num_prompt_tokens == 2000)
    assert 0 < computed < 1900
    assert not any(row.request.token_ids[0] >= 60 for rows in steps for row in rows), "no queued one ran"


async def test_abt_1b_a_reader_that_does_not_read(engine: AsyncLLMEngine) -> None:
    slow = stream(engine, "slow", [9] * 5, 600)
    got = [*(await anext(slow)).outputs[0].token_ids]
    others = [asyncio.create_task(tokens(stream(engine, f"{place}", [place] * 5, 100))) for place in range(3)]
    assert await asyncio.gather(*others) == [[120] * 100] * 3
    async with asyncio.timeout(20):
        while engine.num_unfinished_requests:  # the engine does not wait for the reader
            await asyncio.sleep(0.005)
    pieces = [output.outputs[0] async for output in slow]
    assert len(pieces) == 1, "what waits for the reader is one piece"
    got += pieces[0].token_ids
    assert (got, pieces[0].finish_reason) == ([120] * 600, "length")
    assert len(pieces[0].text) == 600 - 1


async def test_abt_1c_a_storm_of_streams_that_come_and_go(engine: AsyncLLMEngine) -> None:
    async def come_and_go(index: int) -> None:
        outputs = stream(engine, f"{index}", [index] * 5, 1000, n=2)
        if index % 3 == 0:
            await anext(outputs)
            await outputs.aclose()
        else:
            task = asyncio.create_task(anext(outputs))
            await asyncio.sleep(0.001 * (index % 7))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    await asyncio.gather(*(come_and_go(index) for index in range(200)))
    began_s = time.monotonic()
    assert await tokens(stream(engine, "after", [7] * 5, 4)) == [120] * 4
    assert time.monotonic() - began_s < 2
    await idle(engine, 2.0)
