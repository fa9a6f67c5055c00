"""The option ``quantization``, from an engine's arguments to its output."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import pytest
from driving import ask, ids_of, run
from hypothesis_profiles import is_nightly

from jaxpage.config import EngineArgs
from jaxpage.errors import ParameterError

if TYPE_CHECKING:
    from numpy_reference import RandomModel

    from jaxpage import LLM


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"] if is_nightly else ["int8", "int4"])
def test_greedy_output_depends_on_neither_chunks_nor_neighbours(
    quantization: str,
    random_model: Callable[..., RandomModel],
    llm_for: Callable[..., LLM],
    random_ids: Callable[..., list[int]],
) -> None:
    asks = [ask(random_ids(length, seed=length), max_tokens=6) for length in (3, 11, 20)]
    llm = llm_for(random_model().directory, max_num_batched_tokens=8, quantization=quantization)
    together = [ids_of(output) for output in run(llm, asks)]
    llm.reset_prefix_cache()
    assert [ids_of(run(llm, [each])[0]) for each in asks] == together
    assert all(len(ids) == 6 for (ids,) in together)


def test_weights_take_less_memory_and_the_same_time_to_compute(
    random_model: Callable[..., RandomModel], llm_for: Callable[..., LLM]
) -> None:
    num_bytes, seconds = [], []
    for quantization in (None, "int8", "int4"):
        llm = llm_for(random_model().directory, max_num_batched_tokens=8, quantization=quantization)
        params = llm.engine.core.runner.worker.stages[0].params
        num_bytes.append(sum(leaf.nbytes for leaf in jax.tree.leaves(params["layers"])))
        seconds.append(llm.engine.core.scheduler.preemption.policy.seconds_per_token)
    assert 3.5 < num_bytes[0] / num_bytes[1] < 4
    assert 5 < num_bytes[0] / num_bytes[2] < 8
    assert seconds[0] == seconds[1] == seconds[2] > 0


def test_values_of_the_option() -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser(exit_on_error=False))
    assert EngineArgs.from_cli_args(parser.parse_args([])).quantization is None
    assert EngineArgs.from_cli_args(parser.parse_args(["--quantization", "fp8"])).quantization == "fp8"
    for wrong in ("awq", "", 8):
        with pytest.raises(ParameterError, match=f"quantization: must be one of int8, int4, fp8, got {wrong!r}"):
            EngineArgs(quantization=wrong)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="dtype: must be one of auto, float32, bfloat16, got None"):
        EngineArgs(dtype=None)  # type: ignore[arg-type]
