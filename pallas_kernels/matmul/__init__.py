"""``matmul``: a matrix product with a weight as checkpoints store it, [out, in]: the contract.

It owns the meaning of the arguments and their checks; it must not know how any implementation works.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.matmul.blocks import BLOCK_SIZES, PANEL_ROWS, BlockWeight, block_weight, dequantize, real_rows

__all__ = [
    "IMPLEMENTATIONS",
    "BlockWeight",
    "block_weight",
    "dequantize",
    "explain",
    "matmul",
    "multiplies_blocks",
    "real_rows",
]

IMPLEMENTATIONS = ("native", "xla", "reference")


def matmul(
    x: Float[Array, "T D"],
    weight: Float[Array, "... D"] | BlockWeight,
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
        weight: of the dtype of ``x``; or in blocks, which stand for a weight in float32. Only "native" has a product
            for these; others make all of it real first.
        num_real: rows of ``x`` from here on are padding: an implementation may leave them out, and what the result
            holds there (no NaN for a finite ``x``) means nothing. None: there is none.
        sum_dtype: that of the sums before they are rounded to x's dtype. Devices that each have a part of every sum
            exchange these.
        implementation: one of ``IMPLEMENTATIONS``, or "auto" for the best that takes the case. A program that XLA is to
            split over devices needs "xla", and so does one that is to be differentiated.
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
    y = choice.function(**arrays, **options, num_real=num_real)
    if isinstance(weight, BlockWeight):
        y = y.reshape(x.shape[0], math.prod(y.shape[1:]))[:, : weight.num_rows].reshape(x.shape[0], *weight.row_shape)
    return y


def explain(
    x: Any,
    weight: Any | BlockWeight,
    *,
    sum_dtype: Any = jnp.float32,
    implementation: str = "auto",
    platform: str | None = None,
) -> dispatch.Choice:
    """What ``matmul`` takes for these arguments and why not what it prefers; runs nothing.

    Arrays may be ``jax.ShapeDtypeStruct``. Printed, the result is a sentence.
    """
    arrays, options = _arguments(x, weight, sum_dtype)
    return dispatch.choose("matmul", IMPLEMENTATIONS, arrays, options, implementation=implementation, platform=platform)


def multiplies_blocks(platform: str | None = None) -> bool:
    """Whether what is taken there multiplies a ``BlockWeight`` as it is; others make all of it real at every call."""
    struct = jax.ShapeDtypeStruct
    scales = struct((1, 1, PANEL_ROWS), jnp.float32)
    weight = BlockWeight(struct((1, BLOCK_SIZES[0], PANEL_ROWS), jnp.int8), scales, None, (PANEL_ROWS,))  # pyright: ignore[reportArgumentType]
    return explain(struct((1, BLOCK_SIZES[0]), jnp.float32), weight, platform=platform).implementation == "native"


def _arguments(x: Any, weight: Any, sum_dtype: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays and other arguments of an implementation by name, checked."""
    if x.ndim != 2 or jnp.dtype(x.dtype) not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"x must be a matrix of bfloat16 or float32, got {x.dtype} {x.shape}")
    options = {"sum_dtype": jnp.dtype(sum_dtype)}
    if isinstance(weight, BlockWeight):
        return {"x": x, **_blocks(x, weight)}, options
    if weight.ndim < 1 or weight.shape[-1] != x.shape[1] or weight.dtype != x.dtype:
        raise ValueError(
            f"weight must be {x.dtype} of shape [..., {x.shape[1]}] for x of shape {x.shape}, "
            f"got {weight.dtype} {weight.shape}"
        )
    return {"x": x, "weight": weight}, options


def _blocks(x: Any, weight: BlockWeight) -> dict[str, Any]:
    """The arrays of a weight in blocks by name, checked."""
    values, scales, offsets = weight.values, weight.scales, weight.offsets
    panels = -(-weight.num_rows // PANEL_ROWS)
    if values.dtype != jnp.int8 or values.shape != (panels, x.shape[1], PANEL_ROWS):
        raise ValueError(
            f"values must be int8 {(panels, x.shape[1], PANEL_ROWS)} for x of shape {x.shape} and rows of shape "
            f"{weight.row_shape}, got {values.dtype} {values.shape}"
        )
    fitting = [(panels, x.shape[1] // size, PANEL_ROWS) for size in BLOCK_SIZES if x.shape[1] % size == 0]
    if not fitting:
        raise ValueError(f"a weight in blocks has a multiple of {min(BLOCK_SIZES)} columns, x has shape {x.shape}")
    for name, array in (("scales", scales), ("offsets", offsets)):
        if array is not None and (array.dtype != jnp.float32 or array.shape not in fitting):
            raise ValueError(f"{name} must be float32 of shape {fitting}, got {array.dtype} {array.shape}")
    if offsets is not None and offsets.shape != scales.shape:
        raise ValueError(f"offsets must have the shape of scales, {scales.shape}, got {offsets.shape}")
    return {"weight": values, "scales": scales, "offsets": offsets}
