"""Logits that are no numbers end the sample they belong to, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import pytest
from driving import Ask, ask, ids_of, run
from scrapes import Scrape, check_idle

from jaxpage import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from jaxpage import LLM
    from jaxpage.engine.front import Engine


def _without_numbers(kv_cache: Any, block_ids: jax.Array) -> Any:
    return jax.tree.map(lambda x: x.at[block_ids].set(jnp.nan), kv_cache)


def spoil(prompt: list[int], after: int) -> Callable[[Engine], None]:
    """Overwrites the keys and values of a prompt's requests with NaN once they have ``after`` tokens."""
    is_done = False

    def hook(engine: Engine) -> None:
        nonlocal is_done
        runner = engine.core.runner
        for request in engine.core.scheduler.running:
            if not is_done and request.prompt_token_ids == prompt and request.num_computed_tokens >= after:
                is_done = True
                stage = runner.worker.stages[0]
                stage.kv_cache = _without_numbers(stage.kv_cache, jnp.asarray(request.block_ids))

    return hook


@pytest.mark.parametrize("temperature", [0, 1])
def test_one_sample_ends_with_error(
    tiny: LLM, scrape: Callable[[LLM], Scrape], random_ids: Callable[..., list[int]], temperature: float
) -> None:
    bad, good = random_ids(20, 200), random_ids(20, 201)
    asks = [ask(prompt, max_tokens=12, temperature=temperature, seed=3) for prompt in (bad, good)]
    expected = run(tiny, asks)
    tiny.reset_prefix_cache()
    before = scrape(tiny)
    failed, other = run(tiny, asks, spoil(bad, after=24))
    page = scrape(tiny)
    check_idle(page)
    assert failed.outputs[0].finish_reason == "error"
    assert ids_of(failed)[0] == ids_of(expected[0])[0][: len(ids_of(failed)[0])]
    assert ids_of(other) == ids_of(expected[1])
    moved = page.since(before)
    assert moved["corrupted_requests_total"] == 1
    assert moved['request_success_total{finished_reason="error"}'] == 1
    assert moved['request_success_total{finished_reason="length"}'] == 1
    assert moved["e2e_request_latency_seconds_count"] == 1
    assert ids_of(run(tiny, asks)[0]) == ids_of(expected[0]), "what led to it can still be found in the prefix cache"


@pytest.mark.parametrize(
    "params", [SamplingParams(max_tokens=0, prompt_logprobs=0), BeamSearchParams(beam_width=2, max_tokens=12)]
)
def test_searches_and_scores_too(
    tiny: LLM, scrape: Callable[[LLM], Scrape], random_ids: Callable[..., list[int]], params: Any
) -> None:
    before = scrape(tiny)
    [output] = run(tiny, [Ask(random_ids(100, 202), params)], spoil(random_ids(100, 202), after=64))
    assert {sample.finish_reason for sample in output.outputs} == {"error"}
    page = scrape(tiny)
    check_idle(page)
    moved = page.since(before)
    assert moved["corrupted_requests_total"] == moved['request_success_total{finished_reason="error"}'] == 1
