"""Matrix products with weights stored as [out_features, in_features], as checkpoints have them.

The one seam where a platform's preferred operand order and quantised weights come in.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import QuantizedWeight, quantized_matmul

Weight = Float[Array, "... D"] | QuantizedWeight


def linear(x: Float[Array, "T D"], weight: Weight, bias: Float[Array, "..."] | None = None) -> Float[Array, "T ..."]:
    """``x @ weight.T + bias`` with all leading dimensions of the weight as output dimensions; float32 accumulation."""
    if isinstance(weight, QuantizedWeight):
        y = quantized_matmul(x, weight.as_matrix()).reshape(x.shape[0], *weight.shape[:-1])
    else:
        y = lax.platform_dependent(x, weight, cpu=_weight_on_the_left, default=_weight_on_the_right)
    return y if bias is None else y + bias


# A weight keeps its shape: made a matrix, one that devices split by its second dimension would have to be gathered.


def _weight_on_the_right(x: Float[Array, "T D"], weight: Float[Array, "... D"]) -> Float[Array, "T ..."]:
    contracted = (((1,), (weight.ndim - 1,)), ((), ()))
    return lax.dot_general(x, weight, contracted, preferred_element_type=jnp.float32).astype(x.dtype)


def _weight_on_the_left(x: Float[Array, "T D"], weight: Float[Array, "... D"]) -> Float[Array, "T ..."]:
    # XLA's CPU matrix product repacks its operands on every call; for few tokens that is most of the time, and with the
    # weight as left operand it costs about half. The barriers keep XLA from folding the transposes back in.
    contracted = (((weight.ndim - 1,), (0,)), ((), ()))
    y = lax.dot_general(weight, lax.optimization_barrier(x.T), contracted, preferred_element_type=jnp.float32)
    return jnp.moveaxis(lax.optimization_barrier(y), -1, 0).astype(x.dtype)
