"""Which split of a slice's devices a plan takes if nobody says: no other one holds more."""

from __future__ import annotations

from typing import Any

import pytest

from jaxpage.errors import ParameterError
from jaxpage.plan.memory import find_memory
from jaxpage.plan.models import find_values
from jaxpage.plan.scenario import Scenario, make_scenario
from jaxpage.plan.slices import find_slice
from jaxpage.plan.splits import AS_GOOD, choose_scenario


def chosen(model: str, target: str, **options: Any) -> Scenario:
    return choose_scenario(model, find_values(model), find_slice(target), {"max_model_len": 4096, **options})


def full_requests(scenario: Scenario) -> float:
    return find_memory(scenario).full_requests * scenario.num_replicas


@pytest.mark.parametrize(
    ("model", "target", "name"),
    [
        ("llama-3.2-1b", "v5e-8", "TP 8"),
        ("llama-3.2-1b", "v5e-32", "TP 8 x DP 4"),
        ("qwen2.5-7b", "h100x8", "TP 4 x DP 2"),  # 28 heads do not divide by 8
        ("gemma-3-4b", "v6e-8", "TP 4 x DP 2"),  # has 4 KV heads
        ("llama-3.3-70b", "v5e-32", "TP 16 x DP 2"),  # 8 devices have no room for it
        ("llama-3.3-70b", "v5e-16", "TP 16"),
    ],
)
def test_the_split_that_holds_most_is_taken(model: str, target: str, name: str) -> None:
    scenario = chosen(model, target)
    assert scenario.sharding_name == name
    held = full_requests(scenario)
    assert held >= 1
    for size in (1, 2, 4, 8, 16, 32):
        options = {**vars(scenario.args), "tensor_parallel_size": size}
        options["data_parallel_size"] = scenario.where.num_devices // size
        try:
            other = make_scenario(model, scenario.values, scenario.where, options)
        except ParameterError:
            continue
        if other.splits_attention:
            assert AS_GOOD * full_requests(other) <= held, other.sharding_name


def test_what_is_given_is_kept() -> None:
    assert chosen("llama-3.2-1b", "v5e-32", tensor_parallel_size=16).num_devices == 16
    assert chosen("llama-3.2-1b", "v5e-32", data_parallel_size=2).sharding_name == "TP 16 x DP 2"
    assert chosen("llama-3.2-1b", "v5e-32", pipeline_parallel_size=2).sharding_name == "TP 8 x PP 2 x DP 2"
    assert chosen("llama-3.2-1b", "v5e-32", sharding="two_dimensional").sharding_name == "two_dimensional 32"


def test_what_does_not_fit_at_all_is_spread_as_far_as_it_can_be() -> None:
    scenario = chosen("llama-3.3-70b", "v5e-8")
    assert scenario.sharding_name == "TP 8" and not find_memory(scenario).fits
