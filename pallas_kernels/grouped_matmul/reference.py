"""Defines ``grouped_matmul`` in plain float32: all rows times the weights of each group, of which its own are kept.

It must not know of any other implementation.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num


def grouped_matmul(
    x: Float[Array, "T D"],
    weights: Num[Array, "E F D"],
    group_sizes: Int[Array, " E"],
    *,
    scales: Float[Array, "E F"] | None = None,
) -> Float[Array, "T F"]:
    """See ``pallas_kernels.grouped_matmul``."""
    rows = jnp.arange(x.shape[0])[:, None]
    ends = jnp.cumsum(group_sizes)
    out = jnp.zeros((x.shape[0], weights.shape[1]), jnp.float32)
    for group in range(weights.shape[0]):
        matrix = weights[group].astype(jnp.float32)
        if scales is not None:
            matrix = matrix * scales[group, :, None].astype(jnp.float32)
        products = jnp.einsum("td,fd->tf", x.astype(jnp.float32), matrix, precision=lax.Precision.HIGHEST)
        out = jnp.where((rows >= ends[group] - group_sizes[group]) & (rows < ends[group]), products, out)
    return out.astype(x.dtype)
