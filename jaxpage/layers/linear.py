"""Matrix products with weights stored as [out_features, in_features], as checkpoints have them.

The one seam where quantised weights and weights split over devices come in.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpage.parallel.ring import product_of_all, share_of_sum
from jaxpage.parallel.sharding import Layout, on_local_parts, summed
from pallas_kernels import BlockWeight, QuantizedWeight, matmul, quantized_matmul
from pallas_kernels.matmul import real_rows

StoredWeight = Float[Array, "... D"] | QuantizedWeight
Weight = StoredWeight | BlockWeight
Axes = tuple[str | None, ...]


def linear(
    x: Float[Array, "T D"],
    weight: Weight,
    bias: Float[Array, "..."] | None = None,
    *,
    num_tokens: Int[Array, ""] | None = None,
    axes: Axes = (),
    layout: Layout | None = None,
    is_between_blocks: bool = False,
) -> Float[Array, "T ..."]:
    """``x @ weight.T + bias`` with all leading dimensions of the weight as output dimensions.

    Accumulation is float32 on each device; sums over devices are of numbers in the dtype of ``x``.

    Args:
        num_tokens: rows of ``x`` from here on are padding, whose result means nothing; None: there is none.
        axes: logical axes of the weight, for a layout.
        is_between_blocks: ``x`` or the result are hidden states between blocks, whose tokens may be passed on.
    """
    if is_between_blocks and layout is not None and any(layout.passes_tokens(axis, len(x)) for axis in axes):
        y = _in_a_ring(x, weight, axes, layout)
    elif isinstance(weight, QuantizedWeight):
        y = _quantized(x, weight, num_tokens, axes, layout)
    else:
        # Devices that have parts of the sums exchange them as activations are, in bfloat16 half as many bytes.
        has_parts = layout is not None and axes[-1] is not None and layout.ways(axes[-1]) > 1
        # XLA splits its own products over devices and nothing else.
        implementation, sum_dtype = "auto" if layout is None else "xla", x.dtype if has_parts else jnp.float32
        y = matmul(x, weight, num_real=num_tokens, sum_dtype=sum_dtype, implementation=implementation)
    return y if bias is None else y + bias


def rows_of(weight: Float[Array, "F D"] | BlockWeight, rows: Int[Array, " N"]) -> Float[Array, "N D"]:
    """Some rows of a weight."""
    return real_rows(weight, rows) if isinstance(weight, BlockWeight) else weight[rows]


def weight_axes(weight: Any, axes: Axes) -> Any:
    """The logical axes of a weight's arrays, those of the weight being ``axes``, in a pytree like it."""
    return quantized_axes(axes, weight.kind) if isinstance(weight, QuantizedWeight) else axes


def quantized_axes(axes: Axes, kind: str) -> Any:
    """The logical axes of the arrays of a weight with ``axes`` that is stored as this kind of ``QuantizedWeight``."""
    *rows, columns = axes
    # Scales of int4 are of groups of columns, which devices split as they do the columns.
    scales = (columns, *rows) if kind == "int4" else tuple(rows)
    return QuantizedWeight(axes, scales)  # pyright: ignore[reportArgumentType]


def _in_a_ring(x: Float[Array, "T D"], weight: Weight, axes: Axes, layout: Layout) -> Array:
    *rows, columns = axes
    has_parts_of_sums = layout.passes_tokens(columns, len(x))
    [mesh_axis] = layout.table.mesh_axes("tokens")

    def product(weight: Any, part: Array) -> Array:
        if isinstance(weight, QuantizedWeight):
            return quantized_matmul(part, weight.as_matrix()).reshape(part.shape[0], *weight.shape[:-1])
        return matmul(part, weight)

    def passed_on(x: Array, weight: Any) -> Array:
        return (share_of_sum if has_parts_of_sums else product_of_all)(partial(product, weight), x, mesh_axis)

    tokens_in, tokens_out = (None, "tokens") if has_parts_of_sums else ("tokens", None)
    in_axes = ((tokens_in, columns), weight_axes(weight, axes))
    return on_local_parts(layout, passed_on, in_axes, (tokens_out, *rows), x, weight)


def _quantized(
    x: Float[Array, "T D"],
    weight: QuantizedWeight,
    num_tokens: Int[Array, ""] | None,
    axes: Axes,
    layout: Layout | None,
) -> Array:
    *rows, columns = axes if layout is not None else (None,) * len(weight.shape)

    num_tokens = jnp.int32(x.shape[0]) if num_tokens is None else num_tokens

    def product(x: Array, weight: QuantizedWeight, num_tokens: Array) -> Array:
        y = quantized_matmul(x, weight.as_matrix(), num_real=num_tokens).reshape(x.shape[0], *weight.shape[:-1])
        # Where its columns are split, each device has a part of every sum.
        return summed(layout, y, columns)

    in_axes = ((None, columns), weight_axes(weight, (*rows, columns)), ())
    return on_local_parts(layout, product, in_axes, (None, *rows), x, weight, num_tokens)
