"""What a step computes, reads and sends, against sums by hand, and the memory of well-known models on chips."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jaxpage.plan.assess import assess
from jaxpage.plan.memory import find_memory
from jaxpage.plan.models import find_values
from jaxpage.plan.scenario import Scenario
from jaxpage.plan.show import kv_token_bytes
from jaxpage.plan.slices import find_slice
from jaxpage.plan.splits import choose_scenario
from jaxpage.plan.work import StageWork

LLAMA_70B_MATRICES = 80 * (8192 * 8192 * 2 + 2 * 1024 * 8192 + 3 * 8192 * 28672)
LLAMA_70B_NORMS = 161 * 8192


def scenario_of(model: str, target: str, **options: Any) -> Scenario:
    return choose_scenario(model, find_values(model), find_slice(target), {"max_model_len": 4096, **options})


def test_plan_7a_llama_70b_takes_320_kib_a_token() -> None:
    found = assess(scenario_of("llama-3-70b", "h100x8"), context=1024)
    assert kv_token_bytes(found) == 2 * 80 * 8 * 128 * 2 == 320 * 1024
    assert kv_token_bytes(found) * 4096 == 1.25 * 2**30


@pytest.mark.parametrize(("target", "fits"), [("v5e-16", True), ("h100x8", True), ("v5e-8", False), ("l4x1", False)])
def test_plan_7a_llama_70b_fits_where_it_should(target: str, fits: bool) -> None:
    memory = find_memory(scenario_of("llama-3-70b", target))
    assert memory.fits is fits
    assert (memory.problem is None) is fits
    if not fits:
        assert memory.problem is not None and "not enough memory: no KV block" in memory.problem
        free = memory.stages[0].free_bytes
        assert free is not None and free < 0


def test_repeated_kv_heads_take_memory_on_each_device_but_belong_to_one_model() -> None:
    found = assess(scenario_of("llama-3-70b", "v5e-16"), context=1024)
    assert found.scenario.kv_repeats == 2
    assert kv_token_bytes(found) == 320 * 1024
    # 16 devices hold 8 heads: each a whole one.
    assert found.memory.stages[0].bytes_per_block == 64 * 40 * 1024


def test_decode_multiplies_each_weight_once_a_token_and_reads_it_once_a_step() -> None:
    scenario = scenario_of("llama-3-70b", "h100x8")
    work = StageWork(scenario.parts[0]).decode(64, context=1000)
    head = 128256 * 8192
    pairs = 64 * 80 * 1000
    assert work.flops == pytest.approx((2 * 64 * (LLAMA_70B_MATRICES + head) + 4 * pairs * 64 * 128) / 8)
    assert work.weight_bytes == pytest.approx(2 * (LLAMA_70B_MATRICES + head) / 8 + 2 * LLAMA_70B_NORMS)
    assert work.kv_bytes == pytest.approx(64 * (1000 + 1) * 320 * 1024 / 8)
    sums = 64 * 8192 * 2 * (2 * 80 + 1)
    assert work.wire_bytes == pytest.approx(2 * 7 / 8 * sums)


def test_prefill_sees_half_of_its_prompt_on_average() -> None:
    scenario = scenario_of("llama-3-8b", "h100x8", max_num_batched_tokens=2048)
    work = StageWork(scenario.parts[0])
    matrices = 32 * (4096 * 4096 * 2 + 2 * 1024 * 4096 + 3 * 4096 * 14336)
    pairs = 32 * 2048 * (1024 + 1) / 2
    rows = 2 * 128256 * 4096 * 2  # two prompts end in a step of 2,048 tokens
    expected = (2 * 2048 * matrices + rows + 4 * pairs * 32 * 128) / 8
    assert work.prefill(2048, context=1024).flops == pytest.approx(expected)


def test_a_sliding_window_limits_what_is_read() -> None:
    scenario = scenario_of("gemma-3-1b", "v5e-1")
    windows = [layer.sliding_window for layer in scenario.model.layers]
    keys = sum(min(4000, window or 4000) for window in windows)
    work = StageWork(scenario.parts[0]).decode(1, context=4000)
    assert work.kv_bytes == pytest.approx((keys + 26) * 2 * 256 * 2)
    assert keys < 26 * 4000


def test_a_mixture_reads_the_experts_that_its_tokens_choose() -> None:
    work = StageWork(scenario_of("mixtral-8x7b", "h100x8").parts[0])
    experts = 32 * 8 * 3 * 4096 * 14336 * 2 / 8
    few, many = work.decode(1, 1), work.decode(1024, 1)
    assert many.weight_bytes - few.weight_bytes == pytest.approx(experts * 6 / 8, rel=1e-6)
    # Each token is multiplied with two of eight.
    dense = StageWork(scenario_of("mixtral-8x7b", "h100x8", enable_expert_parallel=True).parts[0]).decode(1, 1)
    assert few.flops == pytest.approx(dense.flops)


def test_stages_share_layers_and_their_steps_follow_each_other() -> None:
    one = assess(scenario_of("llama-3-70b", "h100x8", tensor_parallel_size=4), 1024)
    two = assess(scenario_of("llama-3-70b", "h100x8", tensor_parallel_size=4, pipeline_parallel_size=2), 1024)
    assert [stage.num_layers for stage in two.memory.stages] == [40, 40]
    assert sum(stage.weight_bytes for stage in two.memory.stages) == one.memory.stages[0].weight_bytes
    assert two.memory.cache is not None and two.memory.stages[0].kv_bytes == two.memory.stages[1].kv_bytes
    # The same work in two halves, of which each device does one, for half the requests at a time.
    assert two.decode(64).tokens_per_s == pytest.approx(one.decode(64).tokens_per_s, rel=0.2)
    assert two.prefill().tokens_per_s == pytest.approx(2 * one.prefill().tokens_per_s, rel=0.1)


def test_replicas_multiply_what_is_served() -> None:
    one = assess(scenario_of("llama-3-8b", "h100x8", tensor_parallel_size=4), 1024)
    two = assess(scenario_of("llama-3-8b", "h100x8", tensor_parallel_size=4, data_parallel_size=2), 1024)
    assert two.memory == one.memory
    assert two.decode(128).tokens_per_s == pytest.approx(2 * one.decode(64).tokens_per_s)
    assert two.num_served == 2 * one.num_served


def test_the_turning_point_is_where_both_times_are_equal() -> None:
    found = assess(scenario_of("llama-3-8b", "h100x8"), context=128)
    turning = found.compute_bound_from()
    assert turning is not None
    for size, is_compute_bound in ((turning - 1, False), (turning, True)):
        times = found.decode(size).times
        assert (times["compute"] >= times["memory"]) is is_compute_bound
    assert assess(scenario_of("llama-3-8b", "h100x8"), context=4096).compute_bound_from() is None


def test_quantised_weights_are_counted_as_they_are_stored() -> None:
    plain, int8, int4 = (
        scenario_of("llama-3-8b", "h100x1", quantization=kind).parts[0].weight_bytes for kind in (None, "int8", "int4")
    )
    matrices = 32 * (4096 * 4096 * 2 + 2 * 1024 * 4096 + 3 * 4096 * 14336)
    rows = 32 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)
    assert plain - int8 == matrices - 4 * rows
    assert plain - int4 == 2 * matrices - matrices // 2 - 4 * matrices // 128


def test_without_a_size_layers_are_split_over_as_many_devices_as_heads_divide_over() -> None:
    sizes = {name: scenario_of(name, "v6e-8").args for name in ("llama-3-8b", "qwen2.5-7b", "smollm2-135m")}
    assert {name: (args.tensor_parallel_size, args.data_parallel_size) for name, args in sizes.items()} == {
        "llama-3-8b": (8, 1),
        "qwen2.5-7b": (4, 2),
        "smollm2-135m": (1, 8),
    }


def test_a_limit_of_requests_limits_the_cache_but_not_the_room() -> None:
    few, many = (find_memory(scenario_of("llama-3-8b", "h200x8", max_num_seqs=count)) for count in (4, 64))
    assert few.cache is not None and many.cache is not None
    assert few.cache.num_tokens == 4 * 4096
    assert few.num_tokens > 64 * 4096
    assert dataclasses.replace(few.cache, num_blocks=0) == dataclasses.replace(many.cache, num_blocks=0)
