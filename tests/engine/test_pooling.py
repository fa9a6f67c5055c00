"""Prompts as vectors: equal to the reference's hidden states, whatever the chunks, the cache and the preemptions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy_reference
import pytest
from driving import preempt_at

from jaxpage import AsyncEngineArgs, AsyncLLMEngine, PoolingParams, SamplingParams
from jaxpage.errors import ParameterError

if TYPE_CHECKING:
    from numpy_reference import RandomModel

    from jaxpage import LLM


@pytest.fixture
def model(random_model: Callable[..., RandomModel]) -> RandomModel:
    return random_model()


@pytest.fixture
def llm(llm_for: Callable[..., LLM], model: RandomModel) -> LLM:
    return llm_for(model.directory)


def reference(model: RandomModel, prompt: list[int], pooling: str) -> np.ndarray:
    states = numpy_reference.hidden_states(model.config, model.tensors, prompt)
    return states[-1] if pooling == "last" else states.mean(axis=0)


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 50])
def test_the_vector_is_that_of_the_reference(
    llm: LLM, model: RandomModel, random_ids: Callable[..., list[int]], pooling: str, length: int
) -> None:
    prompt = random_ids(length)
    [plain] = llm.embed([prompt], PoolingParams(pooling=pooling, normalize=False))
    expected = reference(model, prompt, pooling)
    assert plain.embedding.dtype == np.float32
    np.testing.assert_allclose(plain.embedding, expected, atol=1e-4)
    [scaled] = llm.embed([prompt], PoolingParams(pooling=pooling))
    np.testing.assert_allclose(scaled.embedding, expected / np.linalg.norm(expected), atol=1e-5)
    [short] = llm.embed([prompt], PoolingParams(pooling=pooling, dimensions=5))
    np.testing.assert_allclose(short.embedding, expected[:5] / np.linalg.norm(expected[:5]), atol=1e-5)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_cached_prefixes_do_not_change_it(
    llm: LLM, model: RandomModel, random_ids: Callable[..., list[int]], pooling: str
) -> None:
    prompt = random_ids(30)
    llm.generate([prompt], SamplingParams(temperature=0, max_tokens=4))
    [output] = llm.embed([prompt], PoolingParams(pooling=pooling, normalize=False))
    np.testing.assert_allclose(output.embedding, reference(model, prompt, pooling), atol=1e-4)
    assert (output.num_cached_tokens > 0) == (pooling == "last")


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("at", [1, 17, 33])
def test_preemption_does_not_change_it(
    llm: LLM, model: RandomModel, random_ids: Callable[..., list[int]], pooling: str, at: int
) -> None:
    prompt, engine, hook = random_ids(45), llm.engine, preempt_at(at)
    engine.add("pooled", prompt, PoolingParams(pooling=pooling, normalize=False))
    outputs = []
    while engine.has_work:
        hook(engine)
        outputs += engine.step()
    [output] = outputs
    np.testing.assert_allclose(output.embedding, reference(model, prompt, pooling), atol=1e-4)


def test_beside_generation(llm: LLM, model: RandomModel, random_ids: Callable[..., list[int]]) -> None:
    prompts = [random_ids(12, seed) for seed in range(6)]
    alone = [each.outputs[0].token_ids for each in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6))]
    llm.reset_prefix_cache()
    engine = llm.engine
    for index, prompt in enumerate(prompts):
        engine.add(f"text-{index}", prompt, SamplingParams(temperature=0, max_tokens=6))
        engine.add(f"mean-{index}", prompt, PoolingParams(pooling="mean", normalize=False))
    done = {}
    while engine.has_work:
        done.update({output.request_id: output for output in engine.step()})
    for index, prompt in enumerate(prompts):
        assert done[f"text-{index}"].outputs[0].token_ids == alone[index]
        np.testing.assert_allclose(done[f"mean-{index}"].embedding, reference(model, prompt, "mean"), atol=1e-4)


def test_aborted_ones_leave_nothing(llm: LLM, random_ids: Callable[..., list[int]]) -> None:
    engine = llm.engine
    engine.add("pooled", random_ids(40), PoolingParams())
    engine.step()
    assert engine.num_unfinished == 1
    engine.abort("pooled")
    while engine.has_work:
        assert engine.step() == []
    assert engine.num_unfinished == 0
    engine.core.scheduler.check_integrity()


def test_wrong_parameters(llm: LLM, random_ids: Callable[..., list[int]]) -> None:
    for values in ({"pooling": "max"}, {"dimensions": 0}, {"normalize": 1}):
        with pytest.raises(ParameterError, match=next(iter(values))):
            PoolingParams(**values)
    with pytest.raises(ParameterError, match="dimensions"):
        llm.embed([random_ids(4)], PoolingParams(dimensions=100_000))
    with pytest.raises(ParameterError, match="no tokens"):
        llm.embed([[]])
    with pytest.raises(ParameterError, match="max_model_len"):
        llm.embed([random_ids(129)])
    assert llm.embed([random_ids(128)])[0].num_prompt_tokens == 128


def test_through_asyncio(model: RandomModel, random_ids: Callable[..., list[int]]) -> None:
    engine = AsyncLLMEngine.from_engine_args(
        AsyncEngineArgs(
            model=str(model.directory),
            max_model_len=64,
            max_num_seqs=4,
            max_num_batched_tokens=16,
            num_gpu_blocks_override=64,
            enforce_eager=True,
        )
    )
    try:
        prompts = [random_ids(20, seed) for seed in range(5)]

        async def go() -> list[np.ndarray]:
            outputs = [engine.embed(prompt, PoolingParams(), str(index)) for index, prompt in enumerate(prompts)]
            return [each.embedding for each in await asyncio.gather(*outputs)]

        for prompt, vector in zip(prompts, asyncio.run(go()), strict=True):
            expected = reference(model, prompt, "last")
            np.testing.assert_allclose(vector, expected / np.linalg.norm(expected), atol=1e-5)
    finally:
        engine.shutdown()
