"""Shapes that steps are padded to: nobody's output depends on padding, on neighbours or on when they come and go."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference
import pytest
from driving import ask, ids_of, run
from schedules import recorded

from jaxpage.request import LogprobDict

if TYPE_CHECKING:
    from numpy_reference import RandomModel

    from jaxpage import LLM

MARK = 7.5


@pytest.fixture(scope="module")
def model(random_model: Callable[..., RandomModel]) -> RandomModel:
    return random_model(num_hidden_layers=1)


@pytest.fixture
def warm(llm_for: Callable[..., LLM], model: RandomModel) -> LLM:
    """Token buckets 1, 8, 16, 32 and 64, with as many rows but 16 at most; all compiled at the start."""
    sizes = {"max_num_batched_tokens": 64, "max_num_seqs": 16, "num_gpu_blocks_override": 200}
    return llm_for(model.directory, enforce_eager=False, max_logprobs=-1, **sizes)


def test_pad_1_padding_writes_to_the_scratch_block_only(
    llm_for: Callable[..., LLM], model: RandomModel, random_ids: Callable[..., list[int]]
) -> None:
    llm = llm_for(model.directory, max_num_seqs=4, enable_prefix_caching=False)
    stage = llm.engine.core.runner.worker.stages[0]
    asks = [ask(random_ids(length), max_tokens=8) for length in (5, 3, 9, 4)]
    expected = [numpy_reference.greedy(model.config, model.tensors, each.prompt, 8) for each in asks]
    for count in range(1, 5):
        stage.kv_cache = jax.tree.map(lambda x: jnp.full_like(x, MARK), stage.kv_cache)
        with recorded(llm) as steps:
            outputs = run(llm, asks[:count])
        assert [ids_of(output) for output in outputs] == [[ids] for ids in expected[:count]]
        written = np.zeros((llm.engine.core.scheduler.kv.pool.num_blocks, 4), bool)
        for row in itertools.chain(*steps):
            for position in range(row.start, row.start + row.num_tokens):
                written[row.block_ids[position // 4], position % 4] = True
        for layer in stage.kv_cache:
            # The cache is [blocks, heads, positions, head_dim].
            is_touched = (np.asarray(layer.kv) != MARK).any(axis=(1, 3))
            assert is_touched[0].any(), "nothing was padded"
            np.testing.assert_array_equal(is_touched[1:], written[1:])


def as_array(entry: LogprobDict) -> np.ndarray:
    return np.array([entry[token].logprob for token in range(len(entry))])


@pytest.mark.slow  # as all that compile every shape at the start
@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 63, 64, 65])
def test_pad_1a_prompts_around_the_edges_of_token_buckets(
    length: int, warm: LLM, model: RandomModel, random_ids: Callable[..., list[int]]
) -> None:
    compilations = warm.engine.core.runner.compilations
    before = compilations.num_serving
    prompt = random_ids(length)
    [output] = run(warm, [ask(prompt, max_tokens=2, logprobs=-1, prompt_logprobs=-1)])
    assert compilations.num_serving == before
    sample = output.outputs[0]
    assert output.prompt_logprobs is not None and sample.logprobs is not None
    listed = [*output.prompt_logprobs[1:], *sample.logprobs]
    logits = numpy_reference.logits(model.config, model.tensors, [*prompt, sample.token_ids[0]])
    expected = numpy_reference.log_softmax(logits)
    assert len(listed) == len(expected) == length + 1
    for entry, row in zip(listed, expected, strict=True):
        assert entry is not None
        np.testing.assert_allclose(as_array(entry), row, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 4, 5, 7, 8, 9])
def test_pad_1a_rows_around_the_edges_of_row_buckets(
    count: int, warm: LLM, model: RandomModel, random_ids: Callable[..., list[int]]
) -> None:
    compilations = warm.engine.core.runner.compilations
    before = compilations.num_serving
    asks = [ask(random_ids(4, seed=place), max_tokens=3, logprobs=-1) for place in range(count)]
    with recorded(warm) as steps:
        outputs = run(warm, asks)
    assert compilations.num_serving == before
    assert count in {len(rows) for rows in steps}
    for each, output in zip(asks, outputs, strict=True):
        sample = output.outputs[0]
        assert sample.logprobs is not None
        logits = numpy_reference.logits(model.config, model.tensors, each.prompt + sample.token_ids[:2])
        for entry, row in zip(sample.logprobs, numpy_reference.log_softmax(logits[-3:]), strict=True):
            np.testing.assert_allclose(as_array(entry), row, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_pad_1c_the_batch_grows_and_shrinks_through_buckets(warm: LLM, random_ids: Callable[..., list[int]]) -> None:
    compilations = warm.engine.core.runner.compilations
    before = compilations.num_serving
    kinds = [{}, {"repetition_penalty": 1.5}, {"temperature": 1.0, "seed": 5, "frequency_penalty": 1.0}]
    asks = [ask(random_ids(3, seed=place), arrives_at=place, max_tokens=10, **kinds[place % 3]) for place in range(9)]
    with recorded(warm) as steps:
        together = run(warm, asks)
    sizes = [len(rows) for rows in steps]
    assert sizes == [*range(1, 10), 9, *range(8, 0, -1)]
    alone = [run(warm, [each])[0] for each in asks]
    assert [ids_of(output) for output in together] == [ids_of(output) for output in alone]
    assert compilations.num_serving == before
