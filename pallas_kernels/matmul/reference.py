"""``matmul`` as it is defined."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.matmul.blocks import real_panels


def matmul(
    x: Float[Array, "T D"],
    weight: Num[Array, "..."],
    scales: Float[Array, "P B R"] | None = None,
    offsets: Float[Array, "P B R"] | None = None,
    *,
    sum_dtype: Any,
    num_real: Int[Array, ""] | None = None,
) -> Float[Array, "T ..."]:
    """See ``pallas_kernels.matmul``."""
    del num_real
    if scales is not None:
        weight = real_panels(weight, scales, offsets).swapaxes(1, 2)
    y = jnp.einsum("td,...d->t...", x.astype(jnp.float32), weight.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    return y.astype(sum_dtype).astype(x.dtype)
