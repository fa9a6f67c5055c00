"""Engines in processes that die, do not start, or lose who started them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from api_client import Api
from replicas import SMALL, collect, is_running, params, pids, wait_for

from jaxpage import AsyncEngineArgs, AsyncLLMEngine
from jaxpage.engine.replicas import supervision
from jaxpage.errors import EngineDeadError, ParameterError

Draw = Callable[..., list[int]]


def accounts(engine: AsyncLLMEngine) -> list[tuple[int, int]]:
    """Samples accepted, and those of them that are neither running, waiting nor ended."""
    numbers = [each.read() for each in engine.all_metrics]
    return [
        (
            each.num_accepted,
            each.num_accepted - sum(each.num_ended.values()) - each.counts.num_running - each.counts.num_waiting,
        )
        for each in numbers
    ]


def test_a_killed_process_under_load(
    engine: AsyncLLMEngine, random_ids: Draw, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every request is answered or fails with a reason, the other engine goes on, and the dead one comes back."""
    monkeypatch.setattr(supervision, "FIRST_DELAY_S", 0.05)
    caplog.set_level(logging.INFO, "jaxpage")
    before = pids(engine)

    async def endless(number: int, stop: asyncio.Event) -> list[Any]:
        """Asks again and again; gives the errors."""
        errors = []
        turn = 0
        while not stop.is_set():
            turn += 1
            try:
                outputs = await collect(engine, random_ids(6, number), params(max_tokens=60), f"{number}-{turn}")
                assert len(outputs[-1].outputs[0].token_ids) == 60
            except EngineDeadError as error:
                errors.append((str(error), time.monotonic()))
        return errors

    async def go() -> None:
        stop = asyncio.Event()
        callers = [asyncio.create_task(endless(number, stop)) for number in range(12)]
        while min(each.num_unfinished for each in engine.group.engines) < 4:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        killed_s = time.monotonic()
        os.kill(before[0], signal.SIGKILL)
        async with asyncio.timeout(60):
            while not engine.group.engines[0].is_dead:
                await asyncio.sleep(0.01)
            assert not engine.is_dead, "the other one lives"
            await engine.check_health()
            while engine.group.engines[0].is_dead or not engine.group.engines[0].num_unfinished:
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)
        stop.set()
        errors = [error for each in await asyncio.gather(*callers) for error in each]
        assert 1 <= len(errors) <= 12, "each caller failed at most once"
        assert all("engine 0: its process was ended by SIGKILL" in text for text, _ in errors)
        assert all(when - killed_s < 1.0 for _, when in errors)

    asyncio.run(go())
    after = pids(engine)
    assert after[0] != before[0] and after[1] == before[1] and not is_running(before[0])
    lines = [record.getMessage() for record in caplog.records]
    assert "engine 0: its process was ended by SIGKILL; it is started again in 0.05 s" in lines
    assert "engine 0 serves again" in lines
    assert any(line.startswith("engine 0: Ready in") for line in lines), "its own log is shown, too"
    wait_for(lambda: all(rest == 0 for _, rest in accounts(engine)))
    assert engine.all_metrics[0].read().num_ended["error"] >= 1


def test_without_any_engine_there_is_no_service_until_one_is_back(
    engine: AsyncLLMEngine, random_ids: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "FIRST_DELAY_S", 0.5)

    async def go() -> None:
        tasks = [
            asyncio.create_task(collect(engine, random_ids(5, place), params(max_tokens=110), str(place)))
            for place in range(4)
        ]
        while min(each.num_unfinished for each in engine.group.engines) < 2:
            await asyncio.sleep(0.005)
        for pid in pids(engine):
            os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(2):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(each, EngineDeadError) for each in results)
        assert engine.is_dead and engine.errored
        for refused in (engine.check_health(), engine.snapshot(), collect(engine, [1], params(), "x")):
            with pytest.raises(EngineDeadError, match="its process was ended by SIGKILL"):
                await refused
        async with asyncio.timeout(60):
            while engine.is_dead:
                await asyncio.sleep(0.05)
        assert (await collect(engine, random_ids(5), params(), "again"))[-1].finished

    asyncio.run(go())


def test_a_signal_to_the_group_is_not_for_the_engines(engine: AsyncLLMEngine) -> None:
    for pid in pids(engine):
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
    assert asyncio.run(collect(engine, [1, 2, 3], params(), "x"))[-1].finished
    assert not any(each.is_dead for each in engine.group.engines)


def test_the_server_over_two_engines(engine: AsyncLLMEngine) -> None:
    """The app's routes with a real group: labels of engines, health, the picture."""

    async def go() -> None:
        api = Api(engine)  # type: ignore[arg-type]
        body = {"max_tokens": 4, "ignore_eos": True, "temperature": 0}
        answers = await asyncio.gather(*(api.complete(prompt=f"prompt {place}", **body) for place in range(6)))
        assert all(answer["usage"]["completion_tokens"] == 4 for answer in answers)
        page = (await api.client.get("/metrics")).text
        for number in (0, 1):
            (line,) = [
                each for each in page.splitlines()
                if each.startswith("jaxpage:generation_tokens_total{") and f'engine="{number}"' in each
            ]  # fmt: skip
            assert float(line.split()[-1]) > 0
        assert (await api.client.get("/health")).status_code == 200
        assert (await api.post("/reset_prefix_cache", {})).status_code == 200
        await api.client.aclose()

    asyncio.run(go())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_model_len": 10**6}, ParameterError, "max_model_len: 1000000 is above the model's limit"),
        ({"model": "no/such-directory-or-model/here"}, ValueError, "no/such-directory-or-model/here"),
    ],
)
def test_what_keeps_an_engine_from_starting_is_said_in_one_line(
    options: dict[str, Any], error: type[Exception], message: str, replica_directory: Path
) -> None:
    given = SMALL | {"model": str(replica_directory), "data_parallel_size": 2, "data_parallel_backend": "process"}
    with pytest.raises(error, match=message) as caught:
        AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**(given | options)))
    assert "\n" not in str(caught.value)


ORPHANS = """
import sys
from jaxpage import AsyncEngineArgs, AsyncLLMEngine
if __name__ == "__main__":
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**{options!r}))
    print(engine.group.engines[0].peer.pid, "jax" in sys.modules, flush=True)
    sys.stdin.read()
"""


def test_a_process_does_not_outlive_who_started_it(replica_directory: Path) -> None:
    options = SMALL | {"model": str(replica_directory), "data_parallel_backend": "process"}
    program = [sys.executable, "-c", ORPHANS.format(options=options)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, has_jax = parent.stdout.readline().split()
        assert is_running(int(pid))
        assert has_jax == "False", "a front end alone leaves the devices to its engines"
        parent.kill()
    wait_for(lambda: not is_running(int(pid)))
