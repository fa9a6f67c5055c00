"""Engines that Ray places, on a cluster of this machine: the answers, and what happens when a process dies."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jaxpage import LLM, AsyncEngineArgs, AsyncLLMEngine, RequestOutput, SamplingParams
from jaxpage.engine.replicas import ray_replica
from jaxpage.engine.replicas.remote import RemoteEngine
from jaxpage.errors import EngineDeadError, ParameterError, StartupError

if TYPE_CHECKING:
    from numpy_reference import RandomModel

SMALL: dict[str, Any] = {
    "max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 8, "block_size": 4,
    "num_gpu_blocks_override": 128, "enforce_eager": True,
}  # fmt: skip
NUM_CPUS = 2
"""That Ray is told to have: two engines fill them."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Ray, with a cluster of its own."""
    ray: Any = pytest.importorskip("ray")
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # it forks, and jax has threads by now
        ray.init(
            num_cpus=NUM_CPUS,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=80 * 2**20,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def directory(random_model: Callable[..., RandomModel]) -> Path:
    return random_model().directory


@pytest.fixture
def expected(llm_for: Callable[..., LLM], directory: Path) -> Callable[..., list[list[int]]]:
    """What one engine in this process says to prompts."""

    def ask(prompts: list[list[int]], **options: Any) -> list[list[int]]:
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [
            output.outputs[0].token_ids for output in llm_for(directory, **SMALL).generate(given, params(**options))
        ]

    return ask


@pytest.fixture
def num_free(cluster: Any) -> Callable[[], float]:
    """How many CPUs of the cluster nobody has."""
    return lambda: cluster.available_resources().get("CPU", 0)


@pytest.fixture
def opened(directory: Path, num_free: Callable[[], float]) -> Iterator[Callable[..., AsyncLLMEngine]]:
    """Opens engines, which are shut down at the end."""
    engines = []

    def open_engine(**options: Any) -> AsyncLLMEngine:
        given = SMALL | {"model": str(directory), "data_parallel_backend": "ray"} | options
        engines.append(AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**given)))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.shutdown()
    assert num_references() == 0, "Ray ends a program that drops one while Ray itself is ending"
    wait_for(lambda: num_free() == NUM_CPUS)


def num_references() -> int:
    """How many objects and actors of Ray this process refers to."""
    from ray._private.worker import global_worker

    return len(global_worker.core_worker.get_all_reference_counts())


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "ignore_eos": True, "max_tokens": 8} | values))


def wait_for(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


async def collect(engine: AsyncLLMEngine, prompt: list[int], name: str, **options: Any) -> list[RequestOutput]:
    return [output async for output in engine.generate({"prompt_token_ids": prompt}, params(**options), name)]


def ask(engine: AsyncLLMEngine, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    async def go() -> list[list[RequestOutput]]:
        return await asyncio.gather(*(collect(engine, each, str(n), **options) for n, each in enumerate(prompts)))

    return [outputs[-1].outputs[0].token_ids for outputs in asyncio.run(go())]


def processes(engine: AsyncLLMEngine, number: int) -> ray_replica.RayProcesses:
    remote = engine.group.engines[number]
    assert isinstance(remote, RemoteEngine) and isinstance(remote.peer, ray_replica.RayProcesses)
    return remote.peer


def test_one_of_two_dies_under_load_and_comes_back(
    opened: Callable[..., AsyncLLMEngine],
    expected: Callable[..., list[list[int]]],
    random_ids: Callable[..., list[int]],
    num_free: Callable[[], float],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "jaxpage")
    prompts = [random_ids(3 + place % 5, place) for place in range(8)]
    right = expected(prompts, max_tokens=100)
    engine = opened(data_parallel_size=2)
    assert num_free() == 0
    assert ask(engine, prompts) == [ids[:8] for ids in right]
    assert all(each.read().num_accepted for each in engine.all_metrics), "both had some of it"
    dying = processes(engine, 0)
    pid = dying.places[0].pid

    async def load() -> list[Any]:
        begun = asyncio.Event()

        async def one(name: int, prompt: list[int]) -> list[int]:
            ids: list[int] = []
            async for output in engine.generate({"prompt_token_ids": prompt}, params(max_tokens=100), f"load-{name}"):
                ids = output.outputs[0].token_ids
                begun.set()
            return ids

        tasks = [asyncio.ensure_future(one(*each)) for each in enumerate(prompts)]
        await begun.wait()
        os.kill(pid, signal.SIGKILL)
        return await asyncio.gather(*tasks, return_exceptions=True)

    answers = asyncio.run(load())
    failed = [answer for answer in answers if isinstance(answer, BaseException)]
    assert 1 <= len(failed) < len(answers)
    for answer, ids in zip(answers, right, strict=True):
        if isinstance(answer, BaseException):
            assert isinstance(answer, EngineDeadError)
            assert "the engine has stopped: engine 0: its process on " in str(answer)
        else:
            assert answer == ids
    assert not engine.is_dead
    assert ask(engine, prompts) == [ids[:8] for ids in right], "the one that lives takes all"
    wait_for(lambda: not engine.group.engines[0].is_dead)
    assert processes(engine, 0) is not dying and processes(engine, 0).places[0].pid != pid
    assert ask(engine, prompts) == [ids[:8] for ids in right]
    assert "engine 0 serves again" in caplog.text


def test_two_processes_share_a_model_and_end_together(
    opened: Callable[..., AsyncLLMEngine],
    expected: Callable[..., list[list[int]]],
    random_ids: Callable[..., list[int]],
) -> None:
    prompts = [random_ids(3 + place, place) for place in range(4)]
    right = expected(prompts)
    engine = opened(tensor_parallel_size=2, num_processes=2)
    assert ask(engine, prompts) == right
    first = engine.group.engines[0]
    pids = [place.pid for place in processes(engine, 0).places]
    assert len(set(pids)) == 2
    os.kill(pids[1], signal.SIGKILL)
    wait_for(lambda: first.is_dead)
    assert "its process 1 of 2 on " in str(first.failure) or "host 1 is gone" in str(first.failure)
    wait_for(lambda: not engine.is_dead)
    assert ask(engine, prompts) == right
    assert not set(pids) & {place.pid for place in processes(engine, 0).places}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_model_len": 10**6}, ParameterError, "max_model_len: 1000000 is above the model's limit"),
        ({"model": "no/such-directory-or-model/here"}, ValueError, "no/such-directory-or-model/here"),
        (
            {"data_parallel_size": 2, "tensor_parallel_size": 3},
            StartupError,
            r"Ray has found no place in \d s for 1 x 3 CPU in a cluster with 2 CPU on 1 host\(s\)",
        ),
    ],
    ids=["option", "model", "place"],
)
def test_what_keeps_an_engine_from_starting_is_said_in_one_line(
    options: dict[str, Any],
    error: type[Exception],
    message: str,
    opened: Callable[..., AsyncLLMEngine],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if error is StartupError:
        monkeypatch.setattr(ray_replica, "PLACEMENT_TIMEOUT_S", 0.5)
        monkeypatch.setattr(ray_replica, "PATIENCE_S", 0.2)
    with pytest.raises(error, match=message) as caught:
        opened(**options)
    assert "\n" not in str(caught.value)
    assert error is not StartupError or "Waiting for a place for 1 x 3 CPU" in caplog.text


PROGRAM = """
import logging, sys, time

import ray

from jaxpage import LLM, AsyncEngineArgs, AsyncLLMEngine

logging.basicConfig()
ray.init(num_cpus=1, num_gpus=0, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False)
options = {"model": sys.argv[1], "data_parallel_backend": "ray", "max_model_len": 128, "num_gpu_blocks_override": 64,
           "block_size": 4, "max_num_seqs": 2, "enforce_eager": True}
if sys.argv[2] == "ends":
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**options))
else:
    LLM(**options).engine.shutdown()
    ray.shutdown()
    time.sleep(3)  # until the last thread that knew Ray has ended
print("the end")
"""


@pytest.mark.parametrize("how", ["leaves", "ends"])
def test_a_program_outlives_its_cluster_and_ends_well(how: str, directory: Path) -> None:
    pytest.importorskip("ray")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(directory), how], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert not any(word in done.stderr for word in ("Traceback", "jaxpage")), done.stderr
    assert done.stdout.endswith("the end\n"), done.stdout


def test_without_ray_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        StartupError, match=r"data_parallel_backend ray needs Ray \(.*\): pip install 'jaxpage\[ray\]'$"
    ):
        AsyncLLMEngine.from_engine_args(AsyncEngineArgs(data_parallel_backend="ray"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coordinator": "host:1"}, "coordinator: is for Ray to choose (data_parallel_backend ray)"),
        ({"process_id": 0}, "process_id: is for Ray to choose (data_parallel_backend ray)"),
        ({"num_processes": 0}, "num_processes: must be at least 1, got 0"),
        ({"num_processes": 2, "tensor_parallel_size": 3}, "num_processes: 2 do not share 3 devices"),
    ],
)
def test_ray_chooses_where_processes_are(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError) as caught:
        AsyncEngineArgs(data_parallel_backend="ray", **options)
    assert str(caught.value).startswith(message)
