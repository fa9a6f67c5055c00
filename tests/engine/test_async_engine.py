"""``AsyncLLMEngine``: many streams at once, aborts from every side, and what happens when a step fails."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from driving import ask, assert_same_scores, ids_of, run

from jaxpage import AsyncEngineArgs, AsyncLLMEngine, RequestOutput, RequestOutputKind, SamplingParams
from jaxpage.errors import EngineDeadError, ParameterError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy_reference import RandomModel

    from jaxpage import LLM

Draw = Callable[..., list[int]]


@pytest.fixture(scope="module")
def directory(random_model: Callable[..., RandomModel]) -> Path:
    return random_model().directory


@pytest.fixture
def llm(llm_for: Callable[..., LLM], directory: Path) -> LLM:
    return llm_for(directory)


@pytest.fixture
def engine(llm: LLM) -> Iterator[AsyncLLMEngine]:
    """A thread over the shared engine; the shutdown leaves the engine itself whole and idle."""
    front = AsyncLLMEngine(llm.engine)
    yield front
    if not front.is_dead:
        asyncio.run(_wait_until_idle(front))
        front.shutdown()


async def _wait_until_idle(engine: AsyncLLMEngine) -> None:
    async with asyncio.timeout(20):
        while engine.num_unfinished_requests or engine.group.engines[0].engine.has_work:
            await asyncio.sleep(0.01)


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "ignore_eos": True, "max_tokens": 8} | values))


async def collect(
    engine: AsyncLLMEngine, prompt: list[int], sampling: SamplingParams, name: str
) -> list[RequestOutput]:
    return [output async for output in engine.generate({"prompt_token_ids": prompt}, sampling, name)]


def test_outputs_are_cumulative(engine: AsyncLLMEngine, random_ids: Draw) -> None:
    outputs = asyncio.run(collect(engine, random_ids(5), params(), "a"))
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == list(range(1, 9))
    assert [output.finished for output in outputs] == [False] * 7 + [True]
    for before, after in itertools.pairwise(outputs):
        assert after.outputs[0].token_ids[:-1] == before.outputs[0].token_ids
        assert after.outputs[0].text.startswith(before.outputs[0].text)
    assert outputs[-1].outputs[0].finish_reason == "length"


def test_deltas_join_to_the_cumulative_text(engine: AsyncLLMEngine, random_ids: Draw) -> None:
    sampling = params(n=2, seed=3, temperature=1.0, max_tokens=20, logprobs=1)

    async def both() -> list[list[RequestOutput]]:
        delta = dataclasses.replace(sampling, output_kind=RequestOutputKind.DELTA)
        return await asyncio.gather(
            collect(engine, random_ids(7), sampling, "whole"), collect(engine, random_ids(7), delta, "delta")
        )

    whole, deltas = asyncio.run(both())
    for index, sample in enumerate(whole[-1].outputs):
        pieces = [piece for output in deltas for piece in output.outputs if piece.index == index]
        assert "".join(piece.text for piece in pieces) == sample.text
        assert [token for piece in pieces for token in piece.token_ids] == sample.token_ids
        # The two requests may share no step: their logprobs agree to rounding only.
        assert_same_scores([entry for piece in pieces for entry in piece.logprobs or []], sample.logprobs)
        assert [piece.finish_reason for piece in pieces][-1] == "length"
        assert not any(piece.finished() for piece in pieces[:-1])


def test_final_only_gives_one_output(engine: AsyncLLMEngine, random_ids: Draw) -> None:
    final = params(output_kind=RequestOutputKind.FINAL_ONLY)
    outputs = asyncio.run(collect(engine, random_ids(5), final, "a"))
    assert [output.finished for output in outputs] == [True]


def test_many_concurrent_streams_get_their_own_outputs(
    llm_for: Callable[..., LLM], directory: Path, random_ids: Draw
) -> None:
    prompts = [random_ids(1 + index % 15, seed=index) for index in range(40)]
    llm = llm_for(directory)
    expected = [ids_of(output)[0] for output in run(llm, [ask(prompt, max_tokens=6) for prompt in prompts])]
    engine = AsyncLLMEngine(llm.engine)

    async def all_of_them() -> list[list[RequestOutput]]:
        return await asyncio.gather(
            *(collect(engine, prompt, params(max_tokens=6), str(index)) for index, prompt in enumerate(prompts))
        )

    streams = asyncio.run(all_of_them())
    engine.shutdown()
    assert [outputs[-1].outputs[0].token_ids for outputs in streams] == expected
    assert all(output.request_id == str(index) for index, outputs in enumerate(streams) for output in outputs)


def test_abort_by_id_ends_the_stream_with_what_there_is(engine: AsyncLLMEngine, random_ids: Draw) -> None:
    async def go() -> list[RequestOutput]:
        outputs = []
        async for output in engine.generate({"prompt_token_ids": random_ids(5)}, params(max_tokens=100), "a"):
            outputs.append(output)
            if len(outputs) == 3:
                await engine.abort("a")
        await engine.abort(["a", "never seen"])
        return outputs

    outputs = asyncio.run(go())
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert 3 <= len(outputs[-1].outputs[0].token_ids) < 100


def test_a_bad_salt_is_refused_and_the_engine_lives_on(engine: AsyncLLMEngine, random_ids: Draw) -> None:
    async def go() -> None:
        for salt in (5, "", ["a"]):
            for prompt, given in (
                ({"prompt_token_ids": [1]}, salt),
                ({"prompt_token_ids": [1], "cache_salt": salt}, None),
            ):
                with pytest.raises(ParameterError, match="cache_salt"):
                    await anext(engine.generate(prompt, params(), "bad", cache_salt=given))  # type: ignore[arg-type]
        assert (await collect(engine, random_ids(5), params(), "good"))[-1].finished

    asyncio.run(go())


def test_leaving_the_iteration_aborts_the_request(engine: AsyncLLMEngine, random_ids: Draw) -> None:
    async def go() -> None:
        stream = engine.generate({"prompt_token_ids": random_ids(5)}, params(max_tokens=100), "a")
        await anext(stream)
        await stream.aclose()
        await _wait_until_idle(engine)
        # The id is free again.
        assert (await collect(engine, random_ids(5), params(), "a"))[-1].finished

    asyncio.run(go())
    assert (
        engine.group.engines[0].engine.core.scheduler.kv.pool.num_free
        == engine.group.engines[0].engine.core.scheduler.kv.pool.num_usable
    )


def test_cancelling_a_queued_request_leaves_nothing_behind(engine: AsyncLLMEngine, random_ids: Draw) -> None:
    async def go() -> None:
        slots = engine.group.engines[0].engine.config.max_num_seqs
        running = [
            asyncio.create_task(collect(engine, random_ids(4), params(max_tokens=100), f"running {index}"))
            for index in range(slots)
        ]
        queued = asyncio.create_task(collect(engine, random_ids(4), params(), "queued"))
        to_abort = asyncio.create_task(collect(engine, random_ids(4), params(), "aborted"))
        while engine.num_unfinished_requests < slots + 2:
            await asyncio.sleep(0.001)
        queued.cancel()
        await engine.abort("aborted")
        aborted = (await to_abort)[-1]
        assert (aborted.outputs[0].finish_reason, aborted.outputs[0].token_ids) == ("abort", [])
        with contextlib.suppress(asyncio.CancelledError):
            await queued
        assert queued.cancelled()
        assert all(outputs[-1].outputs[0].finish_reason == "length" for outputs in await asyncio.gather(*running))

    asyncio.run(go())


def test_an_id_in_use_is_refused_and_the_first_goes_on(engine: AsyncLLMEngine, random_ids: Draw) -> None:
    async def go() -> None:
        first = engine.generate({"prompt_token_ids": random_ids(4)}, params(max_tokens=50), "same")
        await anext(first)
        with pytest.raises(ParameterError, match="request_id: 'same' is in use"):
            await collect(engine, random_ids(4), params(), "same")
        assert [output async for output in first][-1].outputs[0].finish_reason == "length"

    asyncio.run(go())


@pytest.mark.parametrize(
    ("prompt", "values", "message"),
    [
        ({"prompt_token_ids": []}, {}, "prompt: has no tokens"),
        ({"prompt_token_ids": [1] * 200}, {}, "has 200 tokens; max_model_len is 128"),
        ({"prompt_token_ids": [294]}, {}, r"prompt_token_ids\[0\].*294"),
        ({"prompt_token_ids": [1]}, {"logprobs": 21}, r"logprobs: must be in \[0, 20\], got 21"),
        (["no prompt"], {}, r"prompt\[0\]: must be an integer, got .no prompt."),
        (5, {}, "prompt: must be text, token ids or a dict"),
    ],
)
def test_errors_come_before_the_first_output(
    prompt: Any, values: dict[str, Any], message: str, engine: AsyncLLMEngine, random_ids: Draw
) -> None:
    async def go() -> None:
        with pytest.raises(ParameterError, match=message):
            await anext(engine.generate(prompt, params(**values), "bad"))
        assert (await collect(engine, random_ids(4), params(), "good"))[-1].finished
        await engine.check_health()

    asyncio.run(go())


def test_shutdown_lets_requests_finish_if_asked(llm: LLM, random_ids: Draw) -> None:
    engine = AsyncLLMEngine(llm.engine)

    async def go() -> list[RequestOutput]:
        stream = asyncio.create_task(collect(engine, random_ids(5), params(max_tokens=40), "a"))
        while not engine.num_unfinished_requests:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(engine.shutdown, 20.0)
        with pytest.raises(EngineDeadError, match="it was shut down"):
            await collect(engine, random_ids(5), params(), "late")
        return await stream

    outputs = asyncio.run(go())
    assert len(outputs[-1].outputs[0].token_ids) == 40
    assert engine.is_dead and not engine.errored


def test_shutdown_at_once_tells_the_streams(llm: LLM, random_ids: Draw) -> None:
    engine = AsyncLLMEngine(llm.engine)

    async def go() -> None:
        streams = [
            asyncio.create_task(collect(engine, random_ids(5), params(max_tokens=100), str(index)))
            for index in range(12)
        ]
        while not engine.num_unfinished_requests:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(engine.shutdown)
        for result in await asyncio.gather(*streams, return_exceptions=True):
            assert isinstance(result, EngineDeadError)

    asyncio.run(go())
    # The thread is gone; the engine under it is emptied by hand, since other tests share it.
    for name in map(str, range(12)):
        llm.engine.abort(name)
    while llm.engine.has_work:
        llm.engine.step()


def test_a_script_written_for_vllm_runs_with_another_import(directory: Path) -> None:
    engine = AsyncLLMEngine.from_engine_args(
        AsyncEngineArgs(
            model=str(directory),
            enforce_eager=True,
            max_model_len=128,
            max_num_seqs=8,
            max_num_batched_tokens=16,
            block_size=4,
            num_gpu_blocks_override=128,
        )
    )

    async def stream_response(prompt: str, request_id: str) -> str:
        sampling_params = SamplingParams(
            max_tokens=20, temperature=0.8, top_p=0.95, seed=42, output_kind=RequestOutputKind.DELTA
        )
        text = ""
        async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=sampling_params):
            for completion in output.outputs:
                text += completion.text
            if output.finished:
                break
        return text

    async def main() -> None:
        try:
            texts = [await stream_response("The future of artificial intelligence is", f"stream-{i}") for i in (1, 2)]
            assert texts[0] and texts[0] == texts[1]
            final_output = None
            results_generator = engine.generate("Hello, my name is", SamplingParams(temperature=0.0), "0")
            async for request_output in results_generator:
                final_output = request_output
            assert final_output.prompt == "Hello, my name is"
            assert len(final_output.outputs[0].token_ids) == 16
        finally:
            engine.shutdown()

    asyncio.run(main())
