"""Suggestions: each is planned, what does not help is left out, and what helps most comes first."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jaxpage.plan.assess import Assessment, assess
from jaxpage.plan.models import find_values
from jaxpage.plan.slices import find_slice
from jaxpage.plan.splits import choose_scenario
from jaxpage.plan.suggestions import find_suggestions


def plan(model: str, target: str, **options: Any) -> Assessment:
    scenario = choose_scenario(model, find_values(model), find_slice(target), {"max_model_len": 4096, **options})
    return assess(scenario, context=1024)


def test_what_does_not_fit_is_told_what_would_make_it_fit() -> None:
    base = plan("llama-3-8b", "v5e-1")
    found = {item.flags: item for item in find_suggestions(base)}
    assert not base.fits
    assert all(item.makes_it_fit and item.full_requests >= 1 for item in found.values())
    assert {"--quantization int8", "--target v5e-4 --tensor-parallel-size 4 --data-parallel-size 1"} <= found.keys()
    # Cheaper numbers in the cache alone do not: the weights are too large.
    assert "--kv-cache-dtype int8" not in found


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ("--kv-cache-dtype int8", {"kv_cache_dtype": "int8"}),
        ("--quantization int8", {"quantization": "int8"}),
        ("--quantization int4 --kv-cache-dtype int8", {"quantization": "int4", "kv_cache_dtype": "int8"}),
    ],
)
def test_a_suggestion_gives_what_it_says(flags: str, options: dict[str, str]) -> None:
    base = plan("llama-3-8b", "l4x1")
    (found,) = [item for item in find_suggestions(base) if item.flags == flags]
    taken = plan("llama-3-8b", "l4x1", **options)
    assert found.full_requests == pytest.approx(taken.memory.full_requests, rel=1e-6)
    assert found.num_served == taken.num_served
    assert found.tokens_per_s == pytest.approx(taken.decode(taken.num_served).tokens_per_s)
    assert found.gain == pytest.approx(found.tokens_per_s / base.decode(base.num_served).tokens_per_s)
    assert f"{found.num_served} at once" in found.told(base)


def test_the_most_helpful_comes_first_and_nothing_is_worse() -> None:
    found = find_suggestions(plan("llama-3-8b", "h100x8", tensor_parallel_size=2, max_num_seqs=64))
    gains = [item.gain for item in found]
    assert gains == sorted(gains, reverse=True)
    assert all(math.isfinite(gain) and gain > 0.98 for gain in gains)
    flags = [item.flags for item in found]
    assert any("--tensor-parallel-size 4" in text or "--data-parallel-size 2" in text for text in flags)


def test_a_long_request_that_does_not_fit_is_shortened_to_what_does() -> None:
    base = plan("llama-3.1-8b", "l4x1", max_model_len=131072)
    assert base.problems == [
        f"a request of max_model_len 131,072 tokens does not fit: there is room for {base.memory.num_tokens:,} tokens"
    ]
    lengths = [item for item in find_suggestions(base) if item.flags.startswith("--max-model-len")]
    assert lengths
    assert max(int(item.flags.split()[1]) for item in lengths) <= base.memory.num_tokens + 64


def test_more_chips_are_shared_out_as_they_hold_most() -> None:
    base = plan("llama-3.2-1b", "v5e-8")
    assert base.scenario.sharding_name == "TP 8"
    (found,) = [item for item in find_suggestions(base) if item.flags.startswith("--target v5e-32")]
    # On 32 devices each of 8 KV heads would lie on four.
    assert found.flags == "--target v5e-32 --tensor-parallel-size 8 --data-parallel-size 4"
    taken = plan("llama-3.2-1b", "v5e-32")
    assert taken.scenario.sharding_name == "TP 8 x DP 4"
    assert found.full_requests == taken.memory.full_requests * 4 > 3.9 * base.memory.full_requests


def test_the_same_chips_are_shared_out_as_they_hold_most() -> None:
    found = find_suggestions(plan("llama-3.2-1b", "v5e-32", tensor_parallel_size=32))
    splits = [item.flags for item in found if item.flags.startswith("--tensor-parallel-size")]
    assert "--tensor-parallel-size 8 --data-parallel-size 4" in splits
    assert len(set(splits)) == len(splits)
