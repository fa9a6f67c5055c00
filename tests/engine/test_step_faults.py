"""Steps that fail in a real engine: the request at fault ends with an error, all others have what they have alone."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import pytest
from api_client import Api
from driving import Ask, ask, ids_of, run
from replicas import SMALL, collect

from jaxpage import AsyncEngineArgs, AsyncLLMEngine, BeamSearchParams, PoolingParams, SamplingParams
from jaxpage.engine.core import MAX_FAULTS_IN_A_ROW
from jaxpage.engine.front import Engine
from jaxpage.errors import EngineDeadError
from jaxpage.params import StructuredOutputsParams
from jaxpage.scheduler.schedule import Schedule

if TYPE_CHECKING:
    from numpy_reference import RandomModel

    from jaxpage import LLM

WAYS = ["at dispatch", "on the device", "when it is read"]
POISON = 255
"""A prompt that begins with it makes every step fail that computes its last tokens, from its third output on."""


def is_poisoned(schedule: Schedule) -> bool:
    return any(
        item.request.prompt_token_ids[0] == POISON and item.request.num_known_output_tokens >= 2
        for item in schedule.requests
    )


def always(schedule: Schedule) -> bool:
    return True


def only_once() -> Callable[[Schedule], bool]:
    """The eighth step fails."""
    numbers: dict[int, int] = {}
    return lambda schedule: numbers.setdefault(schedule.call, len(numbers)) == 7


class Lost:
    """Results of a step that failed after the next one was dispatched."""

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise RuntimeError("the device is on fire")


@contextlib.contextmanager
def failing(engine: Engine, way: str, fails: Callable[[Schedule], bool] = is_poisoned) -> Iterator[None]:
    """Steps fail for which ``fails`` says so; cache and state are lost then, as they are in life."""
    runner: Any = engine.core.runner
    stage = runner.worker.stages[-1]
    dispatch, run_stage = runner.dispatch, stage.run
    is_failing = False

    def fail(*arrays: Any) -> Any:
        raise RuntimeError("the device is on fire")

    def broken(array: jax.Array) -> jax.Array:
        return jax.jit(lambda x: jax.pure_callback(fail, x, x))(array)

    def failing_dispatch(schedule: Schedule, *rest: Any) -> Any:
        nonlocal is_failing
        is_failing = fails(schedule) and way != "when it is read"
        step = dispatch(schedule, *rest)
        if step is not None and fails(schedule) and way == "when it is read":
            output: Any = step.results.result()._replace(token_ids=Lost())
            step.results = concurrent.futures.Future()
            step.results.set_result(output)
        return step

    def failing_run(*arguments: Any) -> Any:
        nonlocal is_failing
        fails_now, is_failing = is_failing, False  # a step of padding is nobody's fault
        output = run_stage(*arguments)
        if not fails_now:
            return output
        if way == "at dispatch":
            jax.tree.map(lambda array: array.delete(), (stage.kv_cache, stage.state))
            fail()
        return output._replace(token_ids=broken(output.token_ids))

    runner.dispatch, stage.run = failing_dispatch, failing_run
    try:
        yield
    finally:
        del runner.dispatch, stage.run


def engine_of(llm: LLM) -> Engine:
    assert isinstance(llm.engine, Engine)
    return llm.engine


@pytest.fixture
def directory(random_model: Callable[..., RandomModel]) -> Path:
    return random_model().directory


@pytest.fixture
def llm(llm_for: Callable[..., LLM], directory: Path) -> LLM:
    return llm_for(directory)


@pytest.fixture
def crowd(random_ids: Callable[..., list[int]]) -> list[Ask]:
    """One of each kind; they come while others run."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 5},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"logit_bias": {7: 5.0}, "min_tokens": 3},
        {"logprobs": 3},
        {"prompt_logprobs": 2},
        {"temperature": 1.0, "n": 2, "seed": 3},
        {"structured_outputs": StructuredOutputsParams(regex="[ab]{14}"), "ignore_eos": False},
    ]
    asks = [
        ask(random_ids(9 + 3 * number, number), arrives_at=number, **({"max_tokens": 14} | kind))
        for number, kind in enumerate(kinds)
    ]
    search = BeamSearchParams(beam_width=2, max_tokens=8, ignore_eos=True)
    return [*asks, Ask(random_ids(11, 40), search, arrives_at=2)]


def poison(**params: Any) -> Ask:
    return ask([POISON, 1, 2, 3], arrives_at=3, **({"max_tokens": 12} | params))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "options", [{}, {"num_gpu_blocks_override": 24, "preemption_mode": "swap"}], ids=["large pool", "swapping"]
)
def test_only_the_request_at_fault_ends(
    llm_for: Callable[..., LLM], directory: Path, crowd: list[Ask], way: str, options: dict[str, Any]
) -> None:
    llm = llm_for(directory, **options)
    expected = run(llm, [*crowd, poison()])
    llm.reset_prefix_cache()
    num_faults = engine_of(llm).core.num_faults
    with failing(engine_of(llm), way):
        *outputs, failed = run(llm, [*crowd, poison()])
    assert [ids_of(output) for output in outputs] == [ids_of(output) for output in expected[:-1]]
    for output, before in zip(outputs, expected, strict=False):
        for sample, wanted in zip(output.outputs, before.outputs, strict=True):
            assert (sample.text, sample.finish_reason) == (wanted.text, wanted.finish_reason)
            assert sample.logprobs is None or len(sample.logprobs) == len(sample.token_ids)
        assert (output.prompt_logprobs is None) == (before.prompt_logprobs is None)
    [sample] = failed.outputs
    assert (sample.finish_reason, sample.token_ids) == ("error", expected[-1].outputs[0].token_ids[:2])
    assert engine_of(llm).core.num_faults - num_faults == 2, "with the others, and alone"
    assert engine_of(llm).metrics.read().counts.num_faults == engine_of(llm).core.num_faults
    assert [ids_of(output) for output in run(llm, [*crowd, poison()])] == [ids_of(output) for output in expected]


@pytest.mark.parametrize("way", WAYS)
def test_a_fault_that_comes_once_costs_nobody_anything_but_time(llm: LLM, crowd: list[Ask], way: str) -> None:
    expected = run(llm, crowd)
    llm.reset_prefix_cache()
    with failing(engine_of(llm), way, only_once()):
        assert [ids_of(output) for output in run(llm, crowd)] == [ids_of(output) for output in expected]


def test_samples_and_searches_and_vectors_at_fault(llm: LLM, random_ids: Callable[..., list[int]]) -> None:
    search = Ask([POISON, 5, 6], BeamSearchParams(beam_width=2, max_tokens=8, ignore_eos=True))
    good = ask(random_ids(6), max_tokens=8)
    expected = ids_of(run(llm, [good])[0])
    with failing(engine_of(llm), "at dispatch"):
        fine, samples, beams = run(llm, [good, poison(n=3, temperature=1.0), search])
    assert ids_of(fine) == expected
    assert [sample.finish_reason for sample in samples.outputs] == ["error"] * 3
    assert {beam.finish_reason for beam in beams.outputs} == {"error"}
    prompts = [random_ids(7), [POISON, 9, 9]]
    vectors = llm.embed(prompts, PoolingParams())
    with failing(engine_of(llm), "on the device", lambda step: any(each.request.pooling for each in step.requests)):
        outputs = llm.embed(prompts, PoolingParams())
    assert [output.finish_reason for output in outputs] == ["error"] * 2
    assert [output.embedding.size for output in outputs] == [0, 0]
    assert all(
        np.allclose(one.embedding, other.embedding)
        for one, other in zip(vectors, llm.embed(prompts, PoolingParams()), strict=True)
    )


def test_nothing_is_compiled_to_start_over(directory: Path, crowd: list[Ask]) -> None:
    from jaxpage import LLM

    llm = LLM(
        model=str(directory), max_model_len=128, max_num_seqs=8, max_num_batched_tokens=16, block_size=4,
        num_gpu_blocks_override=128,
    )  # fmt: skip
    with failing(engine_of(llm), "at dispatch", only_once()):
        run(llm, crowd)
    assert engine_of(llm).core.num_faults == 1
    assert engine_of(llm).core.runner.compilations.num_serving == 0


def test_a_device_that_always_fails_ends_the_engine_with_the_reason(
    directory: Path, random_ids: Callable[..., list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    args = AsyncEngineArgs(
        model=str(directory), max_model_len=128, max_num_seqs=8, max_num_batched_tokens=16, block_size=4,
        num_gpu_blocks_override=128, enforce_eager=True,
    )  # fmt: skip
    core = Engine(args)
    engine = AsyncLLMEngine(core)
    caplog.set_level(logging.ERROR, "jaxpage")

    async def one(number: int) -> Any:
        params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
        outputs = await collect(engine, random_ids(4, number), params, str(number))
        return outputs[-1].outputs[0].finish_reason

    async def go() -> None:
        results = await asyncio.gather(*map(one, range(20)), return_exceptions=True)
        lost = [result for result in results if isinstance(result, EngineDeadError)]
        assert lost and set(results) - set(lost) <= {"error"}
        assert all("the device is on fire" in str(error) for error in lost)
        with pytest.raises(EngineDeadError, match="the device is on fire"):
            await one(99)
        with pytest.raises(EngineDeadError):
            await engine.check_health()

    with failing(core, "at dispatch", always):
        asyncio.run(go())
    assert engine.is_dead and engine.errored and not engine.is_running
    assert core.core.num_faults == MAX_FAULTS_IN_A_ROW + 1
    engine.shutdown()


def test_a_server_goes_on(directory: Path, random_ids: Callable[..., list[int]]) -> None:
    """One request gets 500, or an error in its stream; the others their answers; health is good, the fault counted."""
    core = Engine(AsyncEngineArgs(model=str(directory), served_model_name="tiny", **SMALL))
    engine = AsyncLLMEngine(core)
    api = Api(engine)
    shared = {"model": "tiny", "temperature": 0, "ignore_eos": True, "max_tokens": 12}

    async def go() -> None:
        good = [api.post("/v1/completions", shared | {"prompt": random_ids(5, number)}) for number in range(4)]
        poisoned = [POISON, 1, 2]
        bad = api.post("/v1/completions", shared | {"prompt": poisoned})
        streamed = api.post("/v1/completions", shared | {"prompt": [*poisoned, 3], "stream": True})
        *answers, error, stream = await asyncio.gather(*good, bad, streamed)
        assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [12] * 4
        assert (error.status_code, error.json()["error"]["type"]) == (500, "InternalServerError"), error.text
        assert stream.status_code == 200 and '"code":500' in stream.text.replace(" ", ""), stream.text
        assert (await api.client.get("/health")).status_code == 200
        assert 'jaxpage:step_faults_total{engine="0",model_name="tiny"} ' in (await api.client.get("/metrics")).text
        await api.client.aclose()

    with failing(core, "on the device"):
        asyncio.run(go())
    engine.shutdown()
