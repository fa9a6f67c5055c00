"""Whole engines over several devices and processes: the tokens are those of one device, whatever happens on the way."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from device_runs import DP, PP, TP, Program, assert_same
from numpy_reference import RandomModel

MESHES: dict[str, dict[str, Any]] = {
    "TP 2": {TP: 2},
    "TP 4, KV heads repeated": {TP: 4},
    "TP 8, attention whole": {TP: 8},
    "PP 2": {PP: 2},
    "PP 4": {PP: 4},
    "PP 3, uneven": {PP: 3, "pipeline_layers": "1,2,1"},
    "TP 2, PP 2": {TP: 2, PP: 2},
    "TP 2, PP 4": {TP: 2, PP: 4},
    "TP 2, PP 2, swapping": {TP: 2, PP: 2, "preemption_mode": "swap"},
    "PP 2, computing again": {PP: 2, "preemption_mode": "recompute"},
    "TP 2, int8 cache": {TP: 2, "kv_cache_dtype": "int8"},
    "TP 2, PP 2, DP 2": {TP: 2, PP: 2, DP: 2},
    "2-D": {TP: 4, "sharding": "two_dimensional"},
    "sequence sharded": {TP: 2, "sharding": "sequence_sharded"},
    "replicated KV": {TP: 2, "sharding": "replicated_kv"},
}


@pytest.fixture(scope="module")
def program(random_model: Callable[..., RandomModel]) -> Program:
    """Four layers, four heads, two KV heads, and a vocabulary that many numbers of devices divide."""
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    return Program(random_model(intermediate_size=64, vocab_size=304, **sizes).directory)


@pytest.fixture(scope="module")
def alone(program: Program) -> dict[str, Any]:
    return program.run([{}])[0]


@pytest.mark.slow
def test_one_device_and_many_give_the_same(program: Program, alone: dict[str, Any]) -> None:
    found = dict(zip(MESHES, program.run(list(MESHES.values())), strict=True))
    (int8,) = program.run([{"kv_cache_dtype": "int8"}])
    for name, result in found.items():
        assert_same(result, int8 if "int8" in name else alone)
        assert result["facts"]["cached_prompt_tokens"] > 0, name
    assert found["TP 2, PP 2, swapping"]["facts"]["swap_preemptions"] > 0
    assert found["PP 2, computing again"]["facts"]["recompute_preemptions"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_on_devices_of_their_own(family: str, tiny_model_dir: Callable[[str], Path]) -> None:
    meshes = [{}, {TP: 4, "enable_expert_parallel": True}, {TP: 2, PP: 2, "enable_expert_parallel": True}, {TP: 2}]
    alone, *others = Program(tiny_model_dir(family)).run(meshes)
    for other in others:
        assert_same(alone, other)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3_text", "qwen2", "qwen3", "mistral", "llama"])
def test_families(family: str, tiny_model_dir: Callable[[str], Path]) -> None:
    alone, *others = Program(tiny_model_dir(family)).run([{}, {TP: 2}, {PP: 2}])
    for other in others:
        assert_same(alone, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_processes", "options"),
    [
        (2, {TP: 2}),
        (2, {TP: 2, "enforce_eager": False}),
        (2, {PP: 2, "enforce_eager": False}),
        (2, {TP: 2, PP: 2}),
        (4, {TP: 2, PP: 2}),
        (4, {TP: 4}),
    ],
)
def test_processes_give_the_same(
    num_processes: int, options: dict[str, Any], program: Program, alone: dict[str, Any]
) -> None:
    assert_same(program.start(num_processes, options).result(), alone)


SECONDS_TO_END = 30
"""Seconds it takes on an idle machine are about five."""


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_process_that_is_killed_ends_the_job_with_a_message(lost: int, program: Program) -> None:
    group = program.start(3, {PP: 3}, ENDLESS="1")
    group.wait_until_it_runs()
    group.processes[lost].send_signal(signal.SIGKILL)
    started = time.monotonic()
    ends = group.ends()
    assert time.monotonic() - started < SECONDS_TO_END
    for index, (code, _, log) in enumerate(ends):
        if index == lost:
            assert code == -signal.SIGKILL
        elif lost == 0:
            assert code not in (0, None) and "the leading host has ended the job or is gone" in log
        else:
            assert code not in (0, None), log
    if lost:
        assert f"host {lost} is gone" in ends[0][2]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{TP: 2}, {TP: 4, "sharding": "replicated_kv"}])
def test_a_process_that_goes_astray_is_found_before_a_token_is_given(options: dict[str, Any], program: Program) -> None:
    ends = program.start(2, options, GO_ASTRAY="1").ends()
    assert "host 1 has not computed in step" in ends[0][2], ends[0][2][-2000:]
    assert all(code not in (0, None) for code, *_ in ends)
    assert "tokens" not in ends[0][1]
