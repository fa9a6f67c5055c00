"""``matmul`` as a product of XLA's, with the operands in the order that a platform computes fastest.

A weight keeps its shape: made a matrix, one that devices split by its second dimension would have to be gathered.
"""

from __future__ import annotations

from functools import partial
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
    """See ``pallas_kernels.matmul``. Blocks are all made real first, in float32."""
    if scales is not None:
        real = real_panels(weight, scales, offsets).swapaxes(1, 2)
        return matmul(x.astype(jnp.float32), real, sum_dtype=sum_dtype).astype(x.dtype)
    del num_real
    on_the_right = partial(_weight_on_the_right, sum_dtype=sum_dtype)
    return lax.platform_dependent(x, weight, cpu=_weight_on_the_left, default=on_the_right)


def _weight_on_the_right(
    x: Float[Array, "T D"], weight: Float[Array, "... D"], sum_dtype: Any
) -> Float[Array, "T ..."]:
    contracted = (((1,), (weight.ndim - 1,)), ((), ()))
    return lax.dot_general(x, weight, contracted, preferred_element_type=sum_dtype).astype(x.dtype)


def _weight_on_the_left(x: Float[Array, "T D"], weight: Float[Array, "... D"]) -> Float[Array, "T ..."]:
    # XLA's CPU matrix product repacks its operands on every call; for few tokens that is most of the time, and with the
    # weight as left operand it costs about half. The barriers keep XLA from folding the transposes back in.
    contracted = (((weight.ndim - 1,), (0,)), ((), ()))
    y = lax.dot_general(weight, lax.optimization_barrier(x.T), contracted, preferred_element_type=jnp.float32)
    return jnp.moveaxis(lax.optimization_barrier(y), -1, 0).astype(x.dtype)
