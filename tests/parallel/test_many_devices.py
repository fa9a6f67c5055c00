"""Whole engines over several devices and processes: the tokens are those of one device, whatever happens on the way."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy_reference import RandomModel

PROGRAM = Path(__file__).parent / "many_devices.py"
TP, PP = "tensor_parallel_size", "pipeline_parallel_size"
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
    "TP 2, PP 2, DP 2": {TP: 2, PP: 2, "data_parallel_size": 2},
    "2-D": {TP: 4, "sharding": "two_dimensional"},
    "sequence sharded": {TP: 2, "sharding": "sequence_sharded"},
    "replicated KV": {TP: 2, "sharding": "replicated_kv"},
}


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return kept | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} | more  # what takes time here is compiling


def run(model: Path, options: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the program prints for each set of options."""
    command = [sys.executable, str(PROGRAM), str(model), json.dumps(options)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=500)
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["tokens"] == other["tokens"]
    for mine, theirs in zip(one["logprobs"], other["logprobs"], strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-3)


@pytest.fixture(scope="module")
def model(random_model: Callable[..., RandomModel]) -> Path:
    """Four layers, four heads, two KV heads, and a vocabulary that many numbers of devices divide."""
    return random_model(
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64, vocab_size=304
    ).directory


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, Any]:
    return run(model, [{}])[0]


@pytest.mark.slow
def test_one_device_and_many_give_the_same(model: Path, alone: dict[str, Any]) -> None:
    found = dict(zip(MESHES, run(model, list(MESHES.values())), strict=True))
    (int8,) = run(model, [{"kv_cache_dtype": "int8"}])
    for name, result in found.items():
        assert_same(result, int8 if "int8" in name else alone)
        if "DP" not in name:  # whose engines count for themselves
            assert result["facts"]["cached_prompt_tokens"] > 0, name
    assert found["TP 2, PP 2, swapping"]["facts"]["swap_preemptions"] > 0
    assert found["PP 2, computing again"]["facts"]["recompute_preemptions"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_on_devices_of_their_own(family: str, tiny_model_dir: Callable[[str], Path]) -> None:
    meshes = [{}, {TP: 4, "enable_expert_parallel": True}, {TP: 2, PP: 2, "enable_expert_parallel": True}, {TP: 2}]
    alone, *others = run(tiny_model_dir(family), meshes)
    for other in others:
        assert_same(alone, other)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3_text", "qwen2", "qwen3", "mistral", "llama"])
def test_families(family: str, tiny_model_dir: Callable[[str], Path]) -> None:
    alone, *others = run(tiny_model_dir(family), [{}, {TP: 2}, {PP: 2}])
    for other in others:
        assert_same(alone, other)


class Group:
    """Processes of one engine on this machine, started at once."""

    def __init__(self, model: Path, num_processes: int, options: dict[str, Any], **more: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        common = options | {"coordinator": f"127.0.0.1:{port}", "num_processes": num_processes}
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(PROGRAM), str(model), json.dumps([common | {"process_id": index}])],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment(**more),
            )
            for index in range(num_processes)
        ]

    def wait_until_it_runs(self) -> None:
        output = self.processes[0].stdout
        assert output is not None
        assert output.readline() == "ready\n"
        time.sleep(1)  # into the first steps

    def ends(self) -> list[tuple[int, str, str]]:
        """Exit code, output and log of each."""
        outputs = [process.communicate(timeout=300) for process in self.processes]
        return [(process.returncode, *texts) for process, texts in zip(self.processes, outputs, strict=True)]


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
    num_processes: int, options: dict[str, Any], model: Path, alone: dict[str, Any]
) -> None:
    ends = Group(model, num_processes, options).ends()
    assert [code for code, *_ in ends] == [0] * num_processes, ends
    assert_same(json.loads(ends[0][1].splitlines()[-1]), alone)


SECONDS_TO_END = 30
"""Seconds it takes on an idle machine are about five."""


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_process_that_is_killed_ends_the_job_with_a_message(lost: int, model: Path) -> None:
    group = Group(model, 3, {PP: 3}, ENDLESS="1")
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
def test_a_process_that_goes_astray_is_found_before_a_token_is_given(options: dict[str, Any], model: Path) -> None:
    ends = Group(model, 2, options, GO_ASTRAY="1").ends()
    assert "host 1 has not computed in step" in ends[0][2], ends[0][2][-2000:]
    assert all(code not in (0, None) for code, *_ in ends)
    assert "tokens" not in ends[0][1]
