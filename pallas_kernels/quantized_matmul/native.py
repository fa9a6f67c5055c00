"""``quantized_matmul`` in C++ for the CPU at hand: some rows of the weight at a time are made real, in its caches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from pallas_kernels import native


def quantized_matmul(
    x: Float[Array, "T D"],
    values: Num[Array, "F bytes"],
    scales: Float[Array, "..."],
    *,
    num_real: Int[Array, ""] | None = None,
) -> Float[Array, "T F"]:
    """See ``pallas_kernels.quantized_matmul``. Numbers are scaled before the product, in float32."""
    result = jax.ShapeDtypeStruct((x.shape[0], values.shape[0]), x.dtype)
    return native.call("pallas_kernels_matmul", result, x, values, scales, native.optional(num_real, jnp.int32))
