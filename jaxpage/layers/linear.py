"""Matrix products with weights stored as [out_features, in_features], as checkpoints have them.

The one seam where a platform's preferred operand order, and later quantised weights, come in.
"""

from __future__ import annotations

import jax
from jax import lax
from jaxtyping import Array, Float


def linear(
    x: Float[Array, "T D"], weight: Float[Array, "... D"], bias: Float[Array, "..."] | None = None
) -> Float[Array, "T ..."]:
    """``x @ weight.T + bias`` with all leading dimensions of the weight as output dimensions; float32 accumulation."""
    matrix = weight.reshape(-1, weight.shape[-1])
    y = lax.platform_dependent(x, matrix, cpu=_weight_on_the_left, default=_weight_on_the_right)
    y = y.reshape(x.shape[0], *weight.shape[:-1])
    return y if bias is None else y + bias


def _weight_on_the_right(x: Float[Array, "T D"], matrix: Float[Array, "F D"]) -> Float[Array, "T F"]:
    return lax.dot_general(x, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jax.numpy.float32).astype(
        x.dtype
    )


def _weight_on_the_left(x: Float[Array, "T D"], matrix: Float[Array, "F D"]) -> Float[Array, "T F"]:
    # XLA's CPU matrix product repacks its operands on every call; for few tokens that is most of the time, and with the
    # weight as left operand it costs about half. The barriers keep XLA from folding the transposes back in.
    columns = lax.optimization_barrier(x.T)
    y = lax.dot_general(matrix, columns, (((1,), (0,)), ((), ())), preferred_element_type=jax.numpy.float32)
    return lax.optimization_barrier(y).T.astype(x.dtype)
