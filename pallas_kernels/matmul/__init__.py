"""``matmul``: a matrix product with a weight as checkpoints store it, [out, in]: the contract.

It owns the meaning of the arguments and their checks; it must not know how any implementation works.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch

IMPLEMENTATIONS = ("native", "xla", "reference")


def matmul(
    x: Float[Array, "T D"],
    weight: Float[Array, "... D"],
    *,
    num_real: Int[Array, ""] | None = None,
    sum_dtype: Any = jnp.float32,
    implementation: str = "auto",
    platform: str | None = None,
) -> Float[Array, "T ..."]:
    """``x @ weight.T``, with all leading dimensions of the weight as output dimensions.

    Accumulation is float32. A row of the result depends on that row of x only, and for one shape not even in its last
    bit on the others.

    Args:
        x: bfloat16 or float32.
        weight: of the dtype of ``x``.
        num_real: rows of ``x`` from here on are padding: an implementation may leave them out, and what the result
            holds there (no NaN for a finite ``x``) means nothing. None: there is none.
        sum_dtype: that of the sums before they are rounded to x's dtype. Devices that each have a part of every sum
            exchange these.
        implementation: one of ``IMPLEMENTATIONS``, or "auto" for the best that takes the case. A program that XLA is to
            split over devices needs "xla".
        platform: "cpu", "gpu" or "tpu", if this is traced for another one than the default device's.

    Returns:
        The product in x's dtype.

    Raises:
        ValueError: for arguments that do not fit each other, an unknown implementation or platform.
        NotImplementedError: if the implementation asked for does not take this case.
    """
    arrays, options = _arguments(x, weight, sum_dtype)
    choice = dispatch.choose(
        "matmul", IMPLEMENTATIONS, arrays, options, implementation=implementation, platform=platform
    )
    return choice.function(**arrays, **options, num_real=num_real)


def explain(
    x: Any, weight: Any, *, sum_dtype: Any = jnp.float32, implementation: str = "auto", platform: str | None = None
) -> dispatch.Choice:
    """What ``matmul`` takes for these arguments and why not what it prefers; runs nothing.

    Arrays may be ``jax.ShapeDtypeStruct``. Printed, the result is a sentence.
    """
    arrays, options = _arguments(x, weight, sum_dtype)
    return dispatch.choose("matmul", IMPLEMENTATIONS, arrays, options, implementation=implementation, platform=platform)


def _arguments(x: Any, weight: Any, sum_dtype: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays and other arguments of an implementation by name, checked."""
    if x.ndim != 2 or jnp.dtype(x.dtype) not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"x must be a matrix of bfloat16 or float32, got {x.dtype} {x.shape}")
    if weight.ndim < 1 or weight.shape[-1] != x.shape[1] or weight.dtype != x.dtype:
        raise ValueError(
            f"weight must be {x.dtype} of shape [..., {x.shape[1]}] for x of shape {x.shape}, "
            f"got {weight.dtype} {weight.shape}"
        )
    return {"x": x, "weight": weight}, {"sum_dtype": jnp.dtype(sum_dtype)}
