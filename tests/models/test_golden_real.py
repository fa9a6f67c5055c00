"""Two real models, from their quantised GGUF files, against Hugging Face's numbers for the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from golden_data import REAL

from jaxpage import LLM, BeamSearchParams, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from jaxpage.request import LogprobDict

MODELS = {"smollm2-135m": "smollm2-135m-instruct", "gemma3-270m": "gemma-3-270m"}
NUM_STEPS = 48
TOP = 20
TOLERANCE = 1e-3
NEAR_TIE = 2e-3
"""Two tokens whose logits are closer than this may change places between correct implementations."""


class Run(NamedTuple):
    """A model's reference numbers, and what the engine made of the same prompts."""

    prompts: dict[str, dict[str, Any]]
    numbers: Any
    tokenized: dict[str, list[int]]
    outputs: dict[str, RequestOutput]


@pytest.fixture(scope="module", params=["smollm2-135m", pytest.param("gemma3-270m", marks=pytest.mark.slow)])
def run(request: pytest.FixtureRequest, builtin_gguf: Callable[[str], Path]) -> Run:
    prompts = {prompt["name"]: prompt for prompt in json.loads((REAL / f"{request.param}.json").read_text())["prompts"]}
    numbers = np.load(REAL / f"{request.param}.npz")
    llm = LLM(
        model=str(builtin_gguf(MODELS[request.param])),
        max_num_batched_tokens=256,
        max_num_seqs=16,
        max_model_len=2048,
        enforce_eager=True,
    )
    tokenizer = llm.get_tokenizer()
    tokenized = {
        name: tokenizer.encode(prompt["text"], add_special_tokens=prompt["add_special_tokens"])
        for name, prompt in prompts.items()
    }
    params = SamplingParams(
        temperature=0, max_tokens=NUM_STEPS, ignore_eos=True, logprobs=TOP, prompt_logprobs=1, detokenize=False
    )
    ids = [{"prompt_token_ids": numbers[f"{name}.prompt_ids"].tolist()} for name in prompts]
    outputs = llm.generate(ids, params, use_tqdm=False)
    return Run(prompts, numbers, tokenized, dict(zip(prompts, outputs, strict=True)))


def test_prompts_are_tokenized_alike(run: Run) -> None:
    for name in run.prompts:
        assert run.tokenized[name] == run.numbers[f"{name}.prompt_ids"].tolist(), name


def test_greedy_tokens_are_equal(run: Run) -> None:
    for name, output in run.outputs.items():
        assert run.numbers[f"{name}.gap"].min() > NEAR_TIE, "a near tie: go on along the golden tokens after it"
        assert output.outputs[0].token_ids == run.numbers[f"{name}.greedy_ids"].tolist(), name


def test_prompt_logprobs(run: Run) -> None:
    for name, output in run.outputs.items():
        ids = output.prompt_token_ids
        scores = [listed[token].logprob for listed, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
        expected = run.numbers[f"{name}.prompt_logprobs"][1:]
        np.testing.assert_allclose(scores, expected, rtol=0, atol=TOLERANCE, err_msg=name)


def test_top_logprobs_of_every_step(run: Run) -> None:
    for name, output in run.outputs.items():
        for step, listed in enumerate(output.outputs[0].logprobs):
            ids = run.numbers[f"{name}.step_top_ids"][step].tolist()
            logprobs = run.numbers[f"{name}.step_top_logprobs"][step]
            check_top(listed, ids, logprobs, f"{name}, step {step}")


def check_top(listed: LogprobDict, ids: list[int], logprobs: np.ndarray, where: str) -> None:
    """The same ids with the same logprobs, except that ids as likely as the last one may be others."""
    assert len(listed) == TOP, where
    for token, logprob in zip(ids, logprobs, strict=True):
        if token in listed:
            assert abs(listed[token].logprob - logprob) < TOLERANCE, f"{where}, id {token}"
        else:
            assert logprob - logprobs[-1] < NEAR_TIE, f"{where}: id {token} is missing"
    ours = sorted((value.logprob for value in listed.values()), reverse=True)
    np.testing.assert_allclose(ours, logprobs, rtol=0, atol=TOLERANCE, err_msg=where)


TOGGLES: dict[str, dict[str, Any]] = {
    "blocks of 16, swap, priorities": {
        "block_size": 16, "num_gpu_blocks_override": 72, "preemption_mode": "swap", "scheduling_policy": "priority",
    },
    "blocks of 64, recompute, no prefix cache": {
        "block_size": 64, "num_gpu_blocks_override": 18, "preemption_mode": "recompute", "enable_prefix_caching": False,
    },
}  # fmt: skip
"""Pools with room for little more than the longest prompt with its answer."""


@pytest.mark.slow
@pytest.mark.parametrize("toggles", TOGGLES)
def test_greedy_tokens_whatever_happens_to_the_blocks(toggles: str, builtin_gguf: Callable[[str], Path]) -> None:
    options = TOGGLES[toggles]
    llm = LLM(
        model=str(builtin_gguf(MODELS["smollm2-135m"])),
        max_num_batched_tokens=64,
        max_num_seqs=16,
        max_model_len=1152,
        enforce_eager=True,
        swap_space=0.25,
        **options,
    )
    numbers = np.load(REAL / "smollm2-135m.npz")
    names = [key.removesuffix(".prompt_ids") for key in numbers if key.endswith(".prompt_ids")]
    prompts: list[Any] = [{"prompt_token_ids": numbers[f"{name}.prompt_ids"].tolist()} for name in names]
    expected = [numbers[f"{name}.greedy_ids"].tolist() for name in names]
    params: list[Any] = [SamplingParams(temperature=0, max_tokens=NUM_STEPS, ignore_eos=True, detokenize=False)] * len(
        prompts
    )
    # Among them, what forks: both begin as the first prompt does.
    params += [SamplingParams(n=4, temperature=1, seed=1, max_tokens=20), BeamSearchParams(beam_width=3, max_tokens=20)]
    priorities = [place % 3 for place in range(len(params))] if "scheduling_policy" in options else None
    stats = llm.engine.core.scheduler.stats
    others = []
    for _ in range(2 if options.get("enable_prefix_caching", True) else 1):
        outputs = llm.generate([*prompts, *prompts[:1] * 2], params, use_tqdm=False, priority=priorities)
        assert [output.outputs[0].token_ids for output in outputs[:-2]] == expected
        others.append([[sample.token_ids for sample in output.outputs] for output in outputs[-2:]])
    if len(others) == 2:
        assert others[0] == others[1], "the second run finds its prompts in the cache"
    assert (stats.num_swap_preemptions > 0) == (options["preemption_mode"] == "swap")
    assert stats.num_preemptions > 0
