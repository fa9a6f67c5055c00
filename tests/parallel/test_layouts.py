"""The forward pass laid over devices gives what one device does, with no more exchanges than its layout needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "sharded_forward.py"
SUMS = {
    "megatron 1": 0,
    "megatron 2": 2,
    "megatron 4": 2,
    "megatron 8": 2,
    "post norms": 2,
    "repeated KV heads": 2,
    "repeated KV heads, biases": 2,
    # The whole attention on each device: only the MLP is summed.
    "smollm2 2": 1,
    "smollm2 3": 2,
    "smollm2 8": 1,
    "int8 KV": 2,
    "int8": 2,
    "int4": 2,
    "fp8": 2,
    # Two a block, and one of the squares for its norm; the router is one more.
    "two_dimensional": 6,
    "two_dimensional int4": 6,
    "two_dimensional experts": 7,
    # XLA for CPU has no reduce-scatter: it cuts a part out of what all-reduce gives.
    "sequence_sharded": 2,
    "sequence_sharded, post norms": 2,
    "sequence_sharded, one token": 2,
    # Tokens and sums are passed on, each time as often as there are neighbours.
    **dict.fromkeys(
        (
            "collective_matmul",
            *(f"collective_matmul, {what}" for what in ("post norms", "biases", "int8", "int4")),
        ),
        0,
    ),
    "collective_matmul, one token": 2,
    "collective_matmul, experts": 1,
    "replicated_kv": 1,
    "experts by features": 2,
    "mixtral EP 4": 2,
    "mixtral EP 4 x 2": 2,
    "qwen3_moe EP 4": 2,
    "qwen3_moe EP 8, int8": 1,
}
"""All-reduces of each layer, for each case of the program."""
GATHERS = {"sequence_sharded": 2, "sequence_sharded, post norms": 2, "collective_matmul, experts": 1}
"""All-gathers of each layer, where there are any."""
HOPS = {case: 4 for case in SUMS if case.startswith("collective_matmul,")}
HOPS |= {"collective_matmul": 4 * 7, "collective_matmul, one token": 0, "collective_matmul, experts": 2}
"""Collective permutes of each layer, where there are any. No layer exchanges anything else."""
SPLIT_TOKENS = ("two_dim", "sequence_sharded", "collective_matmul")
OUTSIDE = {"megatron 1": 0, **{case: 3 for case in SUMS if case.startswith(SPLIT_TOKENS)}}
"""The most exchanges outside layers; without an entry there is one, for the embedding."""
LOCAL_KV_HEADS = {"megatron 1": 8, "megatron 2": 4, "megatron 4": 2, "two_dimensional": 2, "int8 KV": 2}
LOCAL_KV_HEADS |= {"smollm2 2": 3, "smollm2 8": 3, "replicated_kv": 2, "qwen3_moe EP 8, int8": 2}
"""KV heads that a device keeps, where they are more than one."""


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """What the program printed, by case: it needs a process with eight virtual devices."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    result = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, env=environment, timeout=500)
    assert result.returncode == 0, result.stderr[-3000:]
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert {line["case"] for line in lines} == SUMS.keys()
    return {line["case"]: line for line in lines}


@pytest.mark.parametrize("case", SUMS)
def test_a_layout_gives_the_numbers_of_one_device(case: str, found: dict[str, dict[str, Any]]) -> None:
    numbers = found[case]
    assert numbers["largest"] > 0.1, "there is something to compare"
    assert numbers["difference"] < 1e-5 * max(1, numbers["largest"])
    assert numbers["cache_difference"] < 1e-5


@pytest.mark.parametrize("case", SUMS)
def test_a_layer_exchanges_what_its_layout_needs(case: str, found: dict[str, dict[str, Any]]) -> None:
    expected = {"all-reduce": SUMS[case], "all-gather": GATHERS.get(case, 0), "collective-permute": HOPS.get(case, 0)}
    for layer in found[case]["layers"]:
        assert layer == {name: count for name, count in expected.items() if count}
    assert sum(found[case]["others"].values()) <= OUTSIDE.get(case, 1)


@pytest.mark.parametrize("case", SUMS)
def test_a_device_keeps_the_kv_heads_that_it_computes(case: str, found: dict[str, dict[str, Any]]) -> None:
    assert found[case]["local_kv_heads"] == LOCAL_KV_HEADS.get(case, 1)
