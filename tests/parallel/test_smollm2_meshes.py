"""SmolLM2-135M over many devices and processes: the tokens of one device. Its 9 heads and 3 KV heads divide by 3 only.

Every mesh runs with a pool so small that requests lose their blocks, once to the host and once for good, with prompts
in chunks, with hits in the prefix cache and with three samples of a prompt. The one device that all are compared with
has none of that. HYPOTHESIS_PROFILE=nightly runs all of it, some 25 minutes on two cores; else one mesh has to do.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from device_runs import DP, PP, TP, Program, assert_same
from hypothesis_profiles import is_nightly

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # thirty layers take a while to compile

BEGINNING = (
    "The harbour master wrote down every ship that came in that year: its name, its flag, the port it had left, "
    "what it carried and for whom, and how many days it stayed. "
)
PROMPTS = [
    BEGINNING + "The first ship in the book is",
    BEGINNING + "On the last page somebody has added, in another hand,",
    "Once upon a time, there was",
    "def fibonacci(n):",
    "Q: What is the largest planet of the solar system?\nA:",
]
NEAR_TIE = 1e-3
"""Two tokens whose logits are closer than this may change places: devices add up in another order."""
PLAIN = {"max_model_len": 128, "block_size": 8, "num_gpu_blocks_override": 200, "max_num_batched_tokens": 512}
PLAIN |= {"enable_prefix_caching": False}
CROWDED = {"max_model_len": 128, "block_size": 8, "num_gpu_blocks_override": 20, "max_num_batched_tokens": 32}
MESHES: dict[str, dict[str, Any]] = {
    "one device": {},
    "TP 2, attention whole": {TP: 2},
    "TP 3": {TP: 3},
    "TP 4, attention whole": {TP: 4},
    "TP 8, attention whole": {TP: 8},
    "PP 2": {PP: 2},
    "PP 4, uneven": {PP: 4},
    "TP 3, PP 2": {TP: 3, PP: 2},
    "TP 2, PP 2": {TP: 2, PP: 2},
    "DP 2": {DP: 2},
    "DP 2, processes": {DP: 2, "data_parallel_backend": "process"},
    "TP 2, PP 2, DP 2": {TP: 2, PP: 2, DP: 2},
    "2-D, 3 x 2": {TP: 6, "sharding": "two_dimensional"},
    "sequence sharded": {TP: 3, "sharding": "sequence_sharded", "max_num_batched_tokens": 33},  # which 3 divides
    "replicated KV": {TP: 2, "sharding": "replicated_kv"},
}
PROCESSES: list[tuple[int, dict[str, Any], str]] = [
    (2, {TP: 2}, "swap"),
    (2, {TP: 3, PP: 2}, "recompute"),
    (3, {TP: 3}, "swap"),
    (4, {TP: 4}, "recompute"),
    (4, {PP: 4}, "swap"),
]
"""How many, what they are, and what requests that lose their blocks go through."""


@pytest.fixture(scope="module")
def program(builtin_gguf: Callable[[str], Path]) -> Program:
    return Program(builtin_gguf("smollm2-135m-instruct"), PROMPTS, variables={}, timeout_s=1500)


@pytest.fixture(scope="module")
def alone(program: Program) -> dict[str, Any]:
    (plain,) = program.run([PLAIN])
    assert plain["margin"] > NEAR_TIE, "other prompts are needed"
    assert not any(plain["facts"].values())
    return plain


@pytest.mark.parametrize("name", MESHES if is_nightly else ["TP 3"])
def test_a_crowded_mesh_gives_what_one_device_gives(name: str, program: Program, alone: dict[str, Any]) -> None:
    modes = ("swap", "recompute")
    results = program.run([CROWDED | MESHES[name] | {"preemption_mode": mode} for mode in modes])
    for mode, result in zip(modes, results, strict=True):
        assert_same(result, alone)
        assert result["facts"][f"{mode}_preemptions"] > 0
        assert result["facts"]["cached_prompt_tokens"] > 0


if is_nightly:

    @pytest.mark.parametrize(("num_processes", "mesh", "mode"), PROCESSES)
    def test_processes_give_what_one_device_gives(
        num_processes: int, mesh: dict[str, Any], mode: str, program: Program, alone: dict[str, Any]
    ) -> None:
        result = program.start(num_processes, CROWDED | mesh | {"preemption_mode": mode}).result()
        assert_same(result, alone)
        assert result["facts"][f"{mode}_preemptions"] > 0
