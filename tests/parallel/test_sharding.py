"""Arrays laid over a mesh, and the step split over devices."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jaxpage.parallel.sharding import partition_spec, sharded, tensor_parallel_mesh

PROGRAM = Path(__file__).parent / "sharded_step.py"


def test_logical_axes_become_mesh_axes() -> None:
    assert partition_spec(("kv_heads", None, None, "hidden")) == PartitionSpec("model", None, None, None)
    with pytest.raises(KeyError, match="colour"):
        partition_spec(("colour",))


@pytest.mark.parametrize(("num_kv_heads", "num_devices"), [(6, 4), (3, 2), (1, 2)])
def test_cfg_4a_a_dimension_that_does_not_divide_is_named(num_kv_heads: int, num_devices: int) -> None:
    mesh = jax.sharding.AbstractMesh((num_devices,), ("model",))
    message = f"kv_heads of {num_kv_heads} does not divide over the {num_devices} devices of model"
    with pytest.raises(ValueError, match=message):
        sharded(mesh, jax.ShapeDtypeStruct((num_kv_heads, 2), jnp.float32), ("kv_heads", None))  # type: ignore[arg-type]


def test_a_mesh_of_one_device_changes_nothing() -> None:
    mesh = tensor_parallel_mesh(jax.devices()[:1])
    struct = sharded(mesh, jax.ShapeDtypeStruct((6, 2), jnp.float32), ("kv_heads", None))
    assert struct.sharding is not None and struct.sharding.num_devices == 1


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
