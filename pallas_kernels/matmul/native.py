"""``matmul`` in C++ for the CPU at hand: each weight is read once, in the order in which it lies in memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from pallas_kernels import native


def matmul(
    x: Float[Array, "T D"],
    weight: Num[Array, "..."],
    scales: Float[Array, "P B R"] | None = None,
    offsets: Float[Array, "P B R"] | None = None,
    *,
    sum_dtype: Any,
    num_real: Int[Array, ""] | None = None,
) -> Float[Array, "T ..."]:
    """See ``pallas_kernels.matmul``. Sums are float32, and rounded once."""
    del sum_dtype
    num_real = native.optional(num_real, jnp.int32)
    if scales is None:
        result = jax.ShapeDtypeStruct((x.shape[0], *weight.shape[:-1]), x.dtype)
        return native.call("pallas_kernels_matmul", result, x, weight, native.optional(None), num_real)
    result = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0], weight.shape[2]), x.dtype)
    return native.call("pallas_kernels_block_matmul", result, x, weight, scales, native.optional(offsets), num_real)
