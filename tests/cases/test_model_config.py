"""What config.json says shows in what the engine computes and allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy_reference
import pytest
from driving import ask, ids_of, run

from jaxpage.errors import ParameterError
from jaxpage.request import LogprobDict

if TYPE_CHECKING:
    from numpy_reference import RandomModel

    from jaxpage import LLM

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 64,
}


def scores(entries: list[LogprobDict] | None, place: int) -> np.ndarray:
    """Logprobs of the whole vocabulary."""
    assert entries is not None
    return np.array([entries[place][token].logprob for token in range(len(entries[place]))])


def test_cfg_1b_positions_agree_in_decode_prefill_chunks_and_behind_a_hit(
    llm_for: Callable[..., LLM], random_model: Callable[..., RandomModel], random_ids: Callable[..., list[int]]
) -> None:
    model = random_model(rope_scaling=LLAMA3_ROPE)
    common = {"block_size": 16, "num_gpu_blocks_override": 32, "max_logprobs": -1}
    at_once, in_chunks = [llm_for(model.directory, max_num_batched_tokens=size, **common) for size in (70, 7)]
    prompt = random_ids(60)
    decoded = run(in_chunks, [ask(prompt, max_tokens=11, logprobs=-1)])[0].outputs[0]
    whole = prompt + decoded.token_ids[:10]
    last = ask(whole, max_tokens=1, logprobs=-1)
    found = [scores(decoded.logprobs, 10)]
    in_chunks.reset_prefix_cache()
    run(in_chunks, [ask([*whole[:48], (whole[48] + 1) % 256], max_tokens=1)])
    for llm, num_cached in [(in_chunks, 48), (in_chunks, 0), (at_once, 0)]:
        [output] = run(llm, [last])
        assert output.num_cached_tokens == num_cached
        found.append(scores(output.outputs[0].logprobs, 0))
        llm.reset_prefix_cache()
    expected = numpy_reference.log_softmax(numpy_reference.logits(model.config, model.tensors, whole)[69])
    for each in found:
        np.testing.assert_allclose(each, expected, rtol=0, atol=1e-4)


def test_cfg_3a_the_context_is_that_of_the_config(
    llm_for: Callable[..., LLM], random_model: Callable[..., RandomModel], random_ids: Callable[..., list[int]]
) -> None:
    model = random_model(max_position_embeddings=16)
    llm = llm_for(model.directory, max_model_len=None)
    assert llm.engine.config.max_model_len == 16
    prompt = random_ids(10)
    output = run(llm, [ask(prompt, max_tokens=None)])[0]
    assert ids_of(output) == [numpy_reference.greedy(model.config, model.tensors, prompt, 6)]
    assert output.outputs[0].finish_reason == "length"
    with pytest.raises(ParameterError, match="has 16 tokens; max_model_len is 16"):
        run(llm, [ask(random_ids(16))])
    with pytest.raises(ValueError, match="max_model_len: 17 is above the model's limit 16"):
        llm_for(model.directory, max_model_len=17)
