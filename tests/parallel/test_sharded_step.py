"""The step, sampler and donated arrays included, split over devices."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "sharded_step.py"


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "int8"])
def test_cfg_4a_a_split_step_gives_the_tokens_of_one_device_with_two_sums_a_layer(kv_cache_dtype: str) -> None:
    """On eight virtual devices, which a process of its own has."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    result = subprocess.run(
        [sys.executable, PROGRAM, kv_cache_dtype], capture_output=True, text=True, env=environment, timeout=300
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found = ast.literal_eval(result.stdout.strip().splitlines()[-1])
    assert found == {"sums": [0, 0, 1, 1, 2, 2], "others": [], "kept": True}
