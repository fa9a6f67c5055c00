"""The definition of ``quantized_matmul`` in plain float32. Slow: it makes the whole weight real first."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.quantized_matmul.weight import QuantizedWeight, dequantize


def quantized_matmul(
    x: Float[Array, "T D"],
    values: Num[Array, "F bytes"],
    scales: Float[Array, "..."],
    *,
    num_real: Int[Array, ""] | None = None,
) -> Float[Array, "T F"]:
    """See ``pallas_kernels.quantized_matmul``."""
    del num_real
    real = dequantize(QuantizedWeight(values, scales))
    return jnp.dot(x.astype(jnp.float32), real.T, precision=lax.Precision.HIGHEST).astype(x.dtype)
