"""Matrix products of rows that are sorted by group, each group with a matrix of its own: the contract.

Experts of a mixture, or low-rank adapters. It owns the meaning of the arguments and their checks; it must not know how
any implementation works, nor how one is picked (``pallas_kernels.dispatch``).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from pallas_kernels import dispatch

IMPLEMENTATIONS = ("mosaic_tpu", "triton", "xla", "reference")
"""Modules of this folder: ``mosaic_tpu`` for TPU, ``triton`` for NVIDIA GPUs, the other two for any platform."""
X_DTYPES = ("float32", "bfloat16")
WEIGHT_DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")


def grouped_matmul(
    x: Float[Array, "T D"],
    weights: Num[Array, "E F D"],
    group_sizes: Int[Array, " E"],
    *,
    scales: Float[Array, "E F"] | None = None,
    implementation: str = "auto",
    platform: str | None = None,
) -> Float[Array, "T F"]:
    """``x[i] @ weights[e].T`` for every row i, e being the group that the row belongs to.

    Rows lie group after group: the first ``group_sizes[0]`` belong to group 0, and so on. Accumulation is float32. For
    one shape and the same ``group_sizes``, the result of a row depends on nothing of the other rows, to the bit, within
    one implementation; where the groups begin may change its last bits. Weights of groups without rows are not read
    and may hold anything, NaN included.

    Args:
        x: the rows; those past ``sum(group_sizes)`` are padding and may hold anything.
        weights: of each group, as [out_features, in_features].
        group_sizes: not below 0, and together at most T; more is not noticed and gives garbage.
        scales: factors of the output channels of each group, for quantised weights: an element of the weights stands
            for itself times the scale of its channel. They are applied to the float32 sums.
        implementation: one of ``IMPLEMENTATIONS``, or "auto" for the best that takes the case.
        platform: "cpu", "gpu" or "tpu", if this is traced for another one than the default device's.

    Returns:
        The products in x's dtype; zeros for padding rows.

    Raises:
        ValueError: for arguments that do not fit each other, an unknown implementation or platform.
        NotImplementedError: if the implementation asked for does not take this case.
    """
    arrays = _arguments(x, weights, group_sizes, scales)
    choice = dispatch.choose(
        "grouped_matmul", IMPLEMENTATIONS, arrays, {}, implementation=implementation, platform=platform
    )
    return choice.function(**arrays)


def explain(
    x: Any,
    weights: Any,
    group_sizes: Any,
    *,
    scales: Any = None,
    implementation: str = "auto",
    platform: str | None = None,
) -> dispatch.Choice:
    """What ``grouped_matmul`` takes for these arguments and why not what it prefers; runs nothing.

    Arrays may be ``jax.ShapeDtypeStruct``. Printed, the result is a sentence.
    """
    arrays = _arguments(x, weights, group_sizes, scales)
    return dispatch.choose(
        "grouped_matmul", IMPLEMENTATIONS, arrays, {}, implementation=implementation, platform=platform
    )


def _arguments(x: Any, weights: Any, group_sizes: Any, scales: Any) -> dict[str, Any]:
    """Arrays of an implementation by name, checked."""
    if len(x.shape) != 2 or len(weights.shape) != 3:
        raise ValueError(f"x must be [T, D] and weights [E, F, D], got {x.shape} and {weights.shape}")
    if x.shape[1] != weights.shape[2]:
        raise ValueError(f"x has {x.shape[1]} features, weights take {weights.shape[2]}")
    if jnp.dtype(x.dtype).name not in X_DTYPES:
        raise ValueError(f"x must be of one of {', '.join(X_DTYPES)}, got {x.dtype}")
    if jnp.dtype(weights.dtype).name not in WEIGHT_DTYPES:
        raise ValueError(f"weights must be of one of {', '.join(WEIGHT_DTYPES)}, got {weights.dtype}")
    if group_sizes.shape != weights.shape[:1] or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(
            f"group_sizes must be {weights.shape[0]} integers, got {group_sizes.dtype} {list(group_sizes.shape)}"
        )
    if scales is not None and scales.shape != weights.shape[:2]:
        raise ValueError(f"scales must have shape {weights.shape[:2]}, got {scales.shape}")
    return {"x": x, "weights": weights, "group_sizes": group_sizes, "scales": scales}
