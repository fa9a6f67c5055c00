"""The planner's memory against that of engines that run: weights, largest step, cache. Tiny models, one CPU device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from jaxpage.config import EngineArgs
from jaxpage.engine.build import build
from jaxpage.plan.compiled import compile_step
from jaxpage.plan.memory import find_memory
from jaxpage.plan.models import find_values
from jaxpage.plan.scenario import make_scenario
from jaxpage.plan.slices import find_slice


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
    assert report.step_bytes + planned.state_bytes == pytest.approx(stage.programs.step_bytes(largest), rel=0.05)
    assert memory.cache == engine.core.runner.plan
    assert planned.kv_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(stage.kv_cache))
