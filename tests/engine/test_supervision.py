"""Which engine gets a request when engines die, and how often one is started again: with engines that are not there."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from jaxpage import AsyncLLMEngine, SamplingParams
from jaxpage.engine.delivery import hand_out
from jaxpage.engine.replicas import supervision
from jaxpage.engine.replicas.data_parallel import EngineGroup
from jaxpage.engine.replicas.replica import Job, dead
from jaxpage.engine.replicas.routing import Router
from jaxpage.engine.replicas.supervision import Supervisor
from jaxpage.errors import EngineDeadError, StartupError
from jaxpage.metrics import EngineMetrics
from jaxpage.request import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from jaxpage import LLM


class FakeEngine:
    """A replica that answers with its name, or dies of the next request."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.metrics = EngineMetrics()
        self.failure: BaseException | None = None
        self.is_dead = False
        self.dies_at_next = False
        self.platform = "cpu"
        self.jobs: list[Job] = []
        self.was_shut_down = False
        self.starts_with: BaseException | None = None

    num_unfinished = 0

    def wait_until_ready(self) -> str:
        if self.starts_with is not None:
            raise self.starts_with
        return self.platform

    def die(self, reason: str) -> None:
        self.failure, self.is_dead = RuntimeError(reason), True

    def add(self, stream: Any, job: Job) -> None:
        if self.dies_at_next:
            self.die("burnt")
        if self.is_dead:
            raise dead(self.failure)
        self.jobs.append(job)
        sample = CompletionOutput(0, self.name, [1], finish_reason="stop")
        hand_out(stream.loop, {stream: [RequestOutput(job.request_id, None, job.token_ids, [sample], True)]})

    def leave(self, stream: Any, request_id: str) -> None: ...

    def stop(self) -> None:
        self.was_shut_down, self.is_dead = True, True

    def join(self) -> None: ...


@pytest.fixture
def llm(llm_for: Callable[..., LLM], random_model: Callable[..., Any]) -> LLM:
    return llm_for(random_model().directory)


def group_of(llm: LLM, engines: list[FakeEngine]) -> AsyncLLMEngine:
    intake = llm.engine.intake
    router = Router(len(engines), 4, 100)
    return AsyncLLMEngine(EngineGroup(llm.engine.args, intake, engines, router, lambda: None))  # type: ignore[arg-type]


def ask(engine: AsyncLLMEngine, name: str, prompt: list[int], **params: Any) -> str:
    async def go() -> str:
        outputs = engine.generate({"prompt_token_ids": prompt}, SamplingParams(**params), name)
        return [output async for output in outputs][-1].outputs[0].text

    return asyncio.run(go())


def test_the_dead_are_left_out_and_a_job_that_one_did_not_take_goes_to_another(llm: LLM) -> None:
    engines = [FakeEngine("a"), FakeEngine("b"), FakeEngine("c")]
    engine = group_of(llm, engines)
    assert [ask(engine, "x", [number] * 8) for number in range(3)] == ["a", "b", "c"]
    engines[0].dies_at_next = True
    assert [ask(engine, "x", [9 + number] * 8) for number in range(4)] == ["b", "c", "b", "c"]
    assert not engine.is_dead and not engine.errored
    engines[2].die("drowned")
    assert [ask(engine, "x", [20 + number] * 8) for number in range(2)] == ["b", "b"]
    engines[1].dies_at_next = True
    with pytest.raises(EngineDeadError, match="the engine has stopped: burnt"):
        ask(engine, "x", [30] * 8)
    assert engine.is_dead and engine.errored
    assert [load.num_samples for load in engine.group._router.loads] == [0, 0, 0]
    with pytest.raises(EngineDeadError):
        asyncio.run(engine.check_health())


def test_requests_without_a_seed_get_the_ones_that_one_engine_would_draw(llm: LLM) -> None:
    import random

    engines = [FakeEngine("a"), FakeEngine("b")]
    engine = group_of(llm, engines)
    given = SamplingParams()
    for number in range(4):
        ask(engine, "x", [number] * 8)
    ask(engine, "x", [9] * 8, seed=7)
    draw = random.Random(llm.engine.args.seed)
    expected = [draw.getrandbits(63) for _ in range(4)]
    seeds = [job.params.seed for each in zip(*(one.jobs for one in engines), strict=False) for job in each]
    assert seeds == expected and engines[0].jobs[-1].params.seed == 7 and given.seed is None


class Starts:
    """Starts fake engines for a supervisor, and remembers them."""

    def __init__(self) -> None:
        self.made: list[FakeEngine] = []
        self.upcoming: list[Callable[[FakeEngine], None]] = []
        self.on_death: dict[FakeEngine, Callable[[Any], None]] = {}
        self.metrics: list[EngineMetrics | None] = []

    def __call__(self, number: int, metrics: EngineMetrics | None, on_death: Callable[[Any], None]) -> Any:
        engine = FakeEngine(f"{number}.{len(self.made)}")
        self.metrics.append(metrics)
        if self.upcoming:
            self.upcoming.pop(0)(engine)
        self.made.append(engine)
        self.on_death[engine] = on_death
        return engine

    def kill(self, engine: FakeEngine) -> None:
        engine.die(f"{engine.name} was killed")
        self.on_death[engine](engine)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(supervision, "FIRST_DELAY_S", 0.01)
    yield
    deadline = time.monotonic() + 5
    while any(thread.name.startswith("jaxpage-supervisor") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.005)


def test_a_dead_engine_is_replaced(quick: None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxpage")
    starts, died = Starts(), []
    supervisor = Supervisor(2, starts, died.append)
    supervisor.wait_until_ready()
    first, other = supervisor.engines
    starts.upcoming = [lambda engine: setattr(engine, "starts_with", StartupError("no room"))]
    starts.kill(first)  # type: ignore[arg-type]
    wait_for(lambda: supervisor.engines[0] is not first and "serves again" in caplog.text)
    assert died == [0] and supervisor.engines[1] is other and len(starts.made) == 4
    assert starts.metrics == [None, None, first.metrics, first.metrics], "counters go on"
    assert [record.getMessage() for record in caplog.records if record.name == "jaxpage"] == [
        "0.0 was killed; it is started again in 0.01 s",
        "no room; it is started again in 0.02 s",
        "engine 0 serves again",
    ]
    supervisor.close()
    assert all(engine.was_shut_down for engine in supervisor.engines)  # type: ignore[attr-defined]


def test_an_engine_that_dies_again_and_again_is_given_up(quick: None, caplog: pytest.LogCaptureFixture) -> None:
    starts = Starts()
    supervisor = Supervisor(1, starts, lambda number: None)
    supervisor.wait_until_ready()
    for number in range(supervision.MAX_RESTARTS):
        starts.kill(starts.made[-1])
        wait_for(lambda number=number: len(starts.made) == number + 2 and supervisor.engines[0] is starts.made[-1])
    starts.kill(starts.made[-1])
    wait_for(lambda: "it is given up after 5 restarts in 600 s" in caplog.text)
    time.sleep(0.1)
    assert len(starts.made) == supervision.MAX_RESTARTS + 1 and supervisor.engines[0].is_dead
    supervisor.close()


def test_nothing_is_started_after_the_end(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "FIRST_DELAY_S", 30.0)
    starts = Starts()
    supervisor = Supervisor(2, starts, lambda number: None)
    supervisor.wait_until_ready()
    starts.kill(starts.made[0])
    supervisor.close()
    wait_for(lambda: not any(each.name.startswith("jaxpage-supervisor") for each in threading.enumerate()))
    assert len(starts.made) == 2


def test_a_start_that_fails_ends_the_others() -> None:
    starts = Starts()
    starts.upcoming = [lambda engine: None, lambda engine: setattr(engine, "starts_with", ValueError("bad model"))]
    supervisor = Supervisor(3, starts, lambda number: None)
    with pytest.raises(ValueError, match="bad model"):
        supervisor.wait_until_ready()
    assert all(engine.is_dead for engine in starts.made)


def test_engines_that_found_no_device_of_their_own_are_refused() -> None:
    starts = Starts()
    starts.upcoming = [lambda engine: setattr(engine, "platform", "gpu")] * 2
    supervisor = Supervisor(3, starts, lambda number: None)
    with pytest.raises(StartupError, match="engine 2 of 3 finds only a cpu, engine 0 a gpu: there are too few devices"):
        supervisor.wait_until_ready()
    assert all(engine.is_dead for engine in starts.made)
