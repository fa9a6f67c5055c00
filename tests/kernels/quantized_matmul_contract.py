"""What every implementation of ``quantized_matmul`` must do, as checks to call, and the cases to do it in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantized_matmul import QuantizedWeight, quantize, quantized_matmul

BOUNDS = {"float32": 1e-5, "bfloat16": 1e-2}
"""Largest error allowed, relative to the largest magnitude of the float32 reference."""
Implementation = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Takes x, values and scales, as the modules of implementations do."""

make = jax.jit(quantize, static_argnums=(1, 2))
reference = jax.jit(functools.partial(quantized_matmul, implementation="reference"))


class Case(NamedTuple):
    """A product of x [num_tokens, num_columns] with a weight [num_rows, num_columns]."""

    kind: str
    num_tokens: int
    num_rows: int
    num_columns: int
    group_size: int = 128
    dtype: str = "bfloat16"


CASES = {
    "int8": Case("int8", 5, 160, 576),
    "int8 f32": Case("int8", 3, 64, 576, dtype="float32"),
    "int8 one token": Case("int8", 1, 96, 896),
    "int8 many tokens": Case("int8", 136, 160, 320),
    "fp8": Case("fp8", 8, 160, 576),
    "fp8 f32": Case("fp8", 5, 130, 256, dtype="float32"),
    "fp8 many tokens": Case("fp8", 70, 96, 576),
    "int4": Case("int4", 5, 160, 512),
    "int4 groups of 64": Case("int4", 5, 160, 576, group_size=64),
    "int4 groups of 32": Case("int4", 3, 64, 352, group_size=32),
    "int4 f32": Case("int4", 2, 64, 384, dtype="float32"),
    "int4 one token": Case("int4", 1, 200, 256),
    "int4 one group": Case("int4", 4, 96, 128),
    "int4 many tokens": Case("int4", 136, 160, 576, group_size=64),
    "int4 many tokens f32": Case("int4", 140, 64, 256, group_size=32, dtype="float32"),
}


@functools.cache
def arguments(case: Case) -> tuple[jax.Array, QuantizedWeight]:
    """Random x and weight; one column of the weight is zeros, and one row."""
    generator = np.random.default_rng(case.num_rows)
    x = generator.standard_normal((case.num_tokens, case.num_columns))
    weight = 0.02 * generator.standard_normal((case.num_rows, case.num_columns))
    weight[3] = 0.0
    weight[:, 5] = 0.0
    return jnp.asarray(x, case.dtype), make(jnp.asarray(weight, jnp.float32), case.kind, case.group_size)


def check_error(implementation: Implementation, case: Case) -> jax.Array:
    """The result, near the float32 reference."""
    x, weight = arguments(case)
    y = jax.jit(implementation)(x, weight.values, weight.scales)
    assert y.shape == (case.num_tokens, case.num_rows) and y.dtype == x.dtype
    expected = np.asarray(reference(x.astype(jnp.float32), weight))
    error = np.max(np.abs(np.asarray(y, np.float32) - expected)) / np.max(np.abs(expected))
    assert error < BOUNDS[case.dtype]
    assert not np.asarray(y, np.float32)[:, 3].any()
    return y


def check_contract(implementation: Implementation, case: Case) -> None:
    """Error, repetition, and a row whose bits depend on no other row, not even on one of NaN."""
    y = np.asarray(check_error(implementation, case))
    x, weight = arguments(case)
    compiled = jax.jit(implementation)
    np.testing.assert_array_equal(compiled(x, weight.values, weight.scales), y)
    kept = case.num_tokens // 2
    others = jnp.arange(case.num_tokens)[:, None] != kept
    for value in (jnp.nan, 1e4):
        changed = compiled(jnp.where(others, value, x).astype(x.dtype), weight.values, weight.scales)
        np.testing.assert_array_equal(np.asarray(changed)[kept], y[kept])
