"""What every implementation of ``grouped_matmul`` has to show: the cases and the checks.

It owns the cases and their bounds; it must not know of any implementation but the reference. All cases are small enough
for interpreters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.grouped_matmul import reference

BOUNDS = {"float32": 1e-5, "bfloat16": 1e-2}
"""Of the norm of a row's error, relative to the norm of the row."""
Implementation = Callable[..., jax.Array]
"""Takes x, weights, group_sizes and scales, as the modules of implementations do."""


class Case(NamedTuple):
    """Rows of ``group_sizes``, in an x of ``num_rows``: the rest is padding."""

    group_sizes: tuple[int, ...]
    num_rows: int
    out_features: int
    in_features: int
    dtype: str = "bfloat16"
    weight_dtype: str = "bfloat16"
    has_scales: bool = False


F32 = {"dtype": "float32", "weight_dtype": "float32"}
BORDERS = {"group_sizes": (7, 0, 12, 1, 20), "num_rows": 48, "out_features": 160, "in_features": 128}
CASES = {
    "borders": Case(**BORDERS),
    "borders f32": Case(**BORDERS, **F32),
    "int8": Case(**BORDERS, weight_dtype="int8", has_scales=True),
    "int8 f32": Case(**BORDERS, dtype="float32", weight_dtype="int8", has_scales=True),
    "e4m3": Case(**BORDERS, weight_dtype="float8_e4m3fn", has_scales=True),
    "e4m3 f32 without scales": Case(**BORDERS, dtype="float32", weight_dtype="float8_e4m3fn"),
    "x bf16, weights f32": Case(**BORDERS, weight_dtype="float32"),
    "x f32, weights bf16": Case(**BORDERS, dtype="float32"),
    "decode top 2 of 8": Case((0, 0, 1, 0, 0, 1, 0, 0), 2, 64, 96),
    "one row": Case((0, 1, 0), 1, 32, 64, **F32),
    "full, no padding": Case((16, 32, 16), 64, 128, 64),
    "many groups": Case((1, 0, 2, 0, 3, 1, 0, 0, 5, 0, 1, 1, 0, 2, 0, 4), 24, 72, 56, **F32),
    "nothing": Case((0, 0, 0), 8, 64, 64),
    "one group": Case((9,), 9, 48, 40, **F32),
    "adapters down to 8": Case((3, 5, 0, 4), 16, 8, 128),
    "adapters up from 8": Case((3, 5, 0, 4), 16, 160, 8),
    "adapters up from 64 f32": Case((3, 5, 0, 4), 16, 136, 64, **F32),
    "long group": Case((150, 3, 40), 200, 40, 64),
}


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def arguments(case: Case, seed: int = 0, *, constant_row: int | None = None, poisoned: bool = True) -> dict[str, Any]:
    """Arguments by name for random contents.

    Args:
        constant_row: its content is that of seed 0, as the weights and scales always are.
        poisoned: padding rows and the weights and scales of groups without rows are NaN (127 in int8), else zero.
    """
    generator = np.random.default_rng(0)
    shape = (len(case.group_sizes), case.out_features, case.in_features)
    weights = generator.standard_normal(shape) * (20 if case.has_scales else 1)
    scales = (0.05 * generator.random(shape[:2]) + 0.01).astype(np.float32)
    x = generator.standard_normal((case.num_rows, case.in_features))
    if seed:
        row = None if constant_row is None else x[constant_row]
        x = np.random.default_rng(seed).standard_normal(x.shape)
        if constant_row is not None:
            x[constant_row] = row
    is_empty = np.array(case.group_sizes) == 0
    nothing = np.nan if poisoned else 0.0
    x[sum(case.group_sizes) :] = nothing
    scales[is_empty] = nothing
    if case.weight_dtype == "int8":
        weights = np.rint(np.clip(weights, -127, 127))
        weights[is_empty] = 127 if poisoned else 0
    else:
        weights[is_empty] = nothing
    return {
        "x": jnp.asarray(x.astype(dtype_of(case.dtype))),
        "weights": jnp.asarray(weights.astype(dtype_of(case.weight_dtype))),
        "group_sizes": jnp.asarray(case.group_sizes, jnp.int32),
        "scales": jnp.asarray(scales) if case.has_scales else None,
    }


@functools.cache
def _compiled(implementation: Implementation, case: Case) -> Any:
    return jax.jit(implementation)


def run(implementation: Implementation, case: Case, seed: int = 0, **how: Any) -> np.ndarray:
    """Result in float32; compiled once a case."""
    out = _compiled(implementation, case)(**arguments(case, seed, **how))
    assert out.shape == (case.num_rows, case.out_features) and out.dtype == case.dtype
    return np.asarray(out, np.float32)


def check_error(implementation: Implementation, case: Case) -> None:
    """Near the float32 reference though all that nobody owns is NaN; padding is zero."""
    out, given = run(implementation, case), arguments(case, poisoned=False)
    exact = np.asarray(reference.grouped_matmul(**given | {"x": given["x"].astype(jnp.float32)}))
    num_real = sum(case.group_sizes)
    assert not out[num_real:].any(), "padding rows must be zero"
    errors = np.linalg.norm(out - exact, axis=1)[:num_real] / np.linalg.norm(exact, axis=1)[:num_real]
    assert np.max(errors, initial=0.0) <= BOUNDS[case.dtype]


def check_contract(implementation: Implementation, case: Case) -> None:
    """The error, and bits: of a repetition, of other contents where nobody owns them, of a row among other rows."""
    check_error(implementation, case)
    out = run(implementation, case)
    np.testing.assert_array_equal(run(implementation, case), out)
    np.testing.assert_array_equal(run(implementation, case, poisoned=False), out)
    num_real = sum(case.group_sizes)
    for row in {0, num_real // 2, num_real - 1} if num_real else ():
        among_others = run(implementation, case, seed=row + 1, constant_row=row)
        np.testing.assert_array_equal(among_others[row], out[row])
