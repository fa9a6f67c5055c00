"""The planner's memory against that of engines that run: weights, largest step, cache. Tiny models, one CPU device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxpage.config import EngineArgs
from jaxpage.engine.build import build
from jaxpage.plan.compiled import compile_step
from jaxpage.plan.memory import find_memory
from jaxpage.plan.models import find_values
from jaxpage.plan.scenario import make_scenario
from jaxpage.plan.slices import StandIn, find_slice
from jaxpage.runner import gpu_pool
from jaxpage.runner.memory import plan_kv_cache


@pytest.mark.parametrize(
    ("family", "kv_cache_dtype", "quantization"),
    [("llama", "auto", None), ("gemma3_text", "int8", None), ("qwen3", "auto", "int8"), ("mixtral", "auto", None)],
)
def test_plan_7b_memory_is_that_of_the_running_engine(
    tiny_model_dir: Callable[[str], Path], family: str, kv_cache_dtype: str, quantization: str | None
) -> None:
    options = {
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "block_size": 8,
        "kv_cache_dtype": kv_cache_dtype,
        "quantization": quantization,
    }
    directory = str(tiny_model_dir(family))
    engine = build(EngineArgs(model=directory, **options))
    (stage,) = engine.core.runner.worker.stages
    largest = stage.steps[16]

    where = find_slice("cpu")
    here = make_scenario(family, find_values(directory), where, options, jax.local_devices()[:1])
    (part,) = here.parts
    report = compile_step(part, "prefill", num_blocks=2)
    assert report.problem is None
    scenario = make_scenario(family, find_values(directory), where, options)
    (planned,) = find_memory(scenario, [report.step_bytes]).stages
    memory = find_memory(scenario, [report.step_bytes])

    assert planned.weight_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(stage.params))
    assert report.step_bytes + planned.state_bytes == pytest.approx(stage.programs.step_bytes(16, largest), rel=0.05)
    assert memory.cache == engine.core.runner.plan
    assert planned.kv_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(stage.kv_cache))


@pytest.mark.parametrize("utilization", [0.5, 0.9])
def test_a_gpus_memory_is_counted_as_the_engine_counts_it(utilization: float, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"gpu_memory_utilization": utilization, "max_model_len": 8192, "max_num_seqs": 4096}
    options["max_num_batched_tokens"] = 8192
    scenario = make_scenario("llama-3-8b", find_values("llama-3-8b"), find_slice("h100x8"), options)
    memory = find_memory(scenario)
    (stage,) = memory.stages
    share = gpu_pool.wanted_share(utilization)
    monkeypatch.delenv(gpu_pool.VARIABLES[1], raising=False)
    monkeypatch.setenv(gpu_pool.VARIABLE, str(share))
    there: Any = StandIn(0, "gpu", memory_bytes=int(share * 80e9), bytes_in_use=stage.weight_bytes)
    needed = stage.state_bytes + stage.temp_bytes
    assert memory.cache == plan_kv_cache(scenario.args, scenario.config, stage.bytes_per_block, there, needed)
    assert stage.usable_bytes == pytest.approx(utilization * 80e9)
    left = stage.free_bytes
    assert left is not None and 0 <= left < stage.bytes_per_block
