"""The tiny model of every family against Hugging Face's numbers: greedy tokens, logprobs, logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from forward_pass import ForwardPass
from golden_data import TINY, TINY_FAMILIES

from jaxpage import SamplingParams
from jaxpage.models.registry import build_config

if TYPE_CHECKING:
    from jaxpage import LLM

PROMPTS = range(3)
NUM_GREEDY = 24


def tolerance(family: str) -> float:
    """Ten times the largest difference between correct ways to run the same weights."""
    measured = json.loads((TINY / "tolerances.json").read_text())[family]
    return 10 * max(measured[way] for way in ("cache_vs_full", "sdpa", "float64") if measured[way] is not None)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_old_and_new_keys_describe_the_same_model(family: str) -> None:
    generation = json.loads((TINY / family / "generation_config.json").read_text())
    new, old = (json.loads((TINY / family / f"config{age}.json").read_text()) for age in ("", ".legacy"))
    assert new != old
    assert build_config(new, generation)[0] == build_config(old, generation)[0]


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_engine_reproduces_tokens_and_logprobs(
    family: str, tiny_model_dir: Callable[[str], Path], llm_for: Callable[..., LLM]
) -> None:
    golden = np.load(TINY / family / "golden.npz")
    llm = llm_for(tiny_model_dir(family), max_num_batched_tokens=8, max_logprobs=5)
    prompts = [golden[f"prompt_{index}"].tolist() for index in PROMPTS]
    params = SamplingParams(temperature=0, max_tokens=NUM_GREEDY, ignore_eos=True, logprobs=5, prompt_logprobs=5)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    for index, ids, output in zip(PROMPTS, prompts, outputs, strict=True):
        sample = output.outputs[0]
        assert sample.token_ids == golden[f"greedy_{index}"].tolist()
        chosen = [listed[token].logprob for listed, token in zip(sample.logprobs, sample.token_ids, strict=True)]
        np.testing.assert_allclose(chosen, golden[f"greedy_logprob_{index}"], rtol=0, atol=tolerance(family))
        # Position i of the prompt is seen through the entry of token i + 1, the last one through the first new token.
        assert output.prompt_logprobs[0] is None
        listed = [*output.prompt_logprobs[1:], sample.logprobs[0]]
        assert len(listed) == len(ids)
        for position, entry in enumerate(listed):
            best = sorted(entry.items(), key=lambda item: item[1].rank)[:5]
            assert [token for token, _ in best] == golden[f"top5_ids_{index}"][position].tolist()
            np.testing.assert_allclose(
                [value.logprob for _, value in best],
                golden[f"top5_logprobs_{index}"][position],
                rtol=0,
                atol=tolerance(family),
            )


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_cfg_1b_prefill_chunks_and_decode_give_the_same_logits(
    family: str, tiny_model_dir: Callable[[str], Path]
) -> None:
    golden = np.load(TINY / family / "golden.npz")
    model = ForwardPass(tiny_model_dir(family))
    ids = golden["prompt_2"].tolist()
    whole = model.logits(ids, [90])
    np.testing.assert_allclose(whole[-1], golden["last_logits_2"], rtol=0, atol=tolerance(family))
    assert whole.argmax(axis=1).tolist() == golden["argmax_2"].tolist()
    np.testing.assert_allclose(model.logits(ids, [7] * 12 + [6]), whole, rtol=0, atol=tolerance(family))
    np.testing.assert_allclose(model.logits(ids, [60] + [1] * 30), whole, rtol=0, atol=tolerance(family))
