"""An engine with a quantised KV cache: preempted, swapped, forked and shared blocks take their scales along."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from driving import Ask, ask, ids_of, poison, run

from jaxpage import BeamSearchParams

if TYPE_CHECKING:
    from numpy_reference import RandomModel

    from jaxpage import LLM


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("pool", ["swap", "recompute"])
def test_the_same_tokens_however_blocks_move(
    kv_cache_dtype: str,
    pool: str,
    llm_for: Callable[..., LLM],
    random_model: Callable[..., RandomModel],
    random_ids: Callable[..., list[int]],
) -> None:
    asks = [ask(random_ids(length, seed=length), max_tokens=9) for length in (1, 5, 8, 13, 17, 20)]
    asks += [ask(random_ids(6, seed=1), n=3, temperature=1.0, seed=3, max_tokens=7)]
    asks += [Ask(random_ids(5, seed=2), BeamSearchParams(beam_width=2, max_tokens=6, ignore_eos=True))]
    plain = llm_for(random_model().directory, kv_cache_dtype=kv_cache_dtype)
    expected = [ids_of(run(plain, [each])[0]) for each in asks]

    small: dict[str, Any] = {"num_gpu_blocks_override": 8, "preemption_mode": pool, "max_num_batched_tokens": 8}
    llm = llm_for(random_model().directory, kv_cache_dtype=kv_cache_dtype, **small)
    stats = llm.engine.core.scheduler.stats
    for _ in range(2):
        crowd = [dataclasses.replace(each, arrives_at=place // 2) for place, each in enumerate(asks)]
        assert [ids_of(output) for output in run(llm, crowd)] == expected
    assert (stats.num_swap_preemptions > 0) == (pool == "swap")
    assert stats.num_swap_preemptions + stats.num_recompute_preemptions > 0


def test_a_cached_prefix_and_poison_elsewhere_change_nothing(
    llm_for: Callable[..., LLM], random_model: Callable[..., RandomModel], random_ids: Callable[..., list[int]]
) -> None:
    llm = llm_for(random_model().directory, kv_cache_dtype="fp8", num_gpu_blocks_override=9)
    each, overwrite = ask(random_ids(18, seed=4), max_tokens=6), poison(float("nan"))
    cold, warm = (run(llm, [each], overwrite)[0] for _ in range(2))
    assert warm.num_cached_tokens == 17
    assert ids_of(cold) == ids_of(warm)
