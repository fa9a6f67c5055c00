"""``quantized_matmul``: a matrix product with a weight that is stored in int8, int4 or float8. The contract is here."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.quantized_matmul.weight import (
    GROUP_SIZES,
    KINDS,
    QuantizedWeight,
    check_group_size,
    dequantize,
    quantize,
)

__all__ = ["GROUP_SIZES", "IMPLEMENTATIONS", "KINDS", "QuantizedWeight", "dequantize", "quantize", "quantized_matmul"]

IMPLEMENTATIONS = ("mosaic_tpu", "triton", "native", "xla", "reference")


def quantized_matmul(
    x: Float[Array, "T D"],
    weight: QuantizedWeight,
    *,
    num_real: Int[Array, ""] | None = None,
    implementation: str = "auto",
    platform: str | None = None,
) -> Float[Array, "T F"]:
    """``x @ w.T`` for the real weight ``w`` [F, D] that ``weight`` stands for.

    Products are of x in its own dtype with the stored numbers, which bfloat16 holds without loss, and are summed in
    float32; scales multiply the sums. An implementation may instead scale the numbers before the product, and round
    those of int4 to x's dtype. A row of the result depends on that row of x only, and for one shape not even in its
    last bit on the others.

    Args:
        x: bfloat16 or float32.
        weight: of two dimensions (see ``QuantizedWeight.as_matrix``).
        num_real: rows of ``x`` from here on are padding: an implementation may leave them out, and what the result
            holds there (no NaN for a finite ``x``) means nothing. None: there is none.
        implementation: one of ``IMPLEMENTATIONS``, or "auto" for the best that takes the case.
        platform: "cpu", "gpu" or "tpu", if this is traced for another one than the default device's.

    Returns:
        The product in x's dtype.

    Raises:
        ValueError: for arguments that do not fit each other, an unknown implementation or platform.
        NotImplementedError: if the implementation asked for does not take this case.
    """
    arrays = _arguments(x, weight)
    choice = dispatch.choose(
        "quantized_matmul", IMPLEMENTATIONS, arrays, {}, implementation=implementation, platform=platform
    )
    return choice.function(**arrays, num_real=num_real)


def explain(
    x: Any, weight: QuantizedWeight, *, implementation: str = "auto", platform: str | None = None
) -> dispatch.Choice:
    """What ``quantized_matmul`` takes for these arguments and why not what it prefers; runs nothing.

    Arrays may be ``jax.ShapeDtypeStruct``. Printed, the result is a sentence.
    """
    return dispatch.choose(
        "quantized_matmul",
        IMPLEMENTATIONS,
        _arguments(x, weight),
        {},
        implementation=implementation,
        platform=platform,
    )


def _arguments(x: Any, weight: QuantizedWeight) -> dict[str, jax.Array]:
    """The arrays of an implementation by name, checked."""
    if x.ndim != 2 or jnp.dtype(x.dtype) not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"x must be a matrix of bfloat16 or float32, got {x.dtype} {x.shape}")
    if len(weight.shape) != 2 or weight.shape[1] != x.shape[1]:
        raise ValueError(f"weight must have shape [F, {x.shape[1]}] for x of shape {x.shape}, got {weight.shape}")
    num_rows, num_columns = weight.shape
    if weight.scales.dtype != jnp.float32:
        raise ValueError(f"scales must be float32, got {weight.scales.dtype}")
    if weight.kind == "int4":
        if weight.scales.ndim != 2 or weight.scales.shape[1] != num_rows or not weight.scales.shape[0]:
            raise ValueError(f"scales must have shape [D / group_size, {num_rows}], got {weight.scales.shape}")
        check_group_size(num_columns, num_columns // weight.scales.shape[0])
    elif weight.scales.shape != (num_rows,):
        raise ValueError(f"scales must have shape {(num_rows,)}, got {weight.scales.shape}")
    return {"x": x, "values": weight.values, "scales": weight.scales}
