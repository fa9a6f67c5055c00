"""Grouped matrix products in plain XLA operations: loops over groups, parts of their weights and tiles of their rows.

All loops run as often as the groups at hand need, a number known on the device only: the work is that of the real rows,
each rounded up to a tile of its group, and the weights of a group are read once, those of an empty one never. (JAX's
own ``ragged_dot`` has no such loop on CPU: it multiplies all rows by all groups' weights, 40 times slower for one token
with 2 of 8 experts, 10 times for 64 rows.)

It owns the whole contract on every platform: it refuses no case. It must not know of any other implementation.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num

MIN_TILE_ROWS = 8
CPU_TILE_ROWS, TILE_ROWS = 32, 128
"""Most rows of a tile. XLA's CPU products are hardly faster with more, and each group's last tile is half empty."""
CPU_PART_BYTES = 2 * 2**20
"""Bytes of the weights that are multiplied at once on CPU. XLA copies them out of their array first, which is cheap as
long as the copy stays in the cache."""


def grouped_matmul(
    x: Float[Array, "T D"],
    weights: Num[Array, "E F D"],
    group_sizes: Int[Array, " E"],
    *,
    scales: Float[Array, "E F"] | None = None,
) -> Float[Array, "T F"]:
    """See ``pallas_kernels.grouped_matmul``."""
    num_rows = x.shape[0]
    num_groups, out_features, _ = weights.shape
    dtype = jnp.float32 if jnp.float32 in (x.dtype, weights.dtype) else jnp.bfloat16
    if scales is None:
        scales = jnp.ones(weights.shape[:2], jnp.float32)
    # As many rows as an average group has.
    rows = 1 << max(0, -(-num_rows // num_groups) - 1).bit_length()
    out = lax.platform_dependent(
        x,
        weights,
        group_sizes,
        scales,
        cpu=functools.partial(_multiply_on_cpu, min(max(rows, MIN_TILE_ROWS), CPU_TILE_ROWS)),
        default=functools.partial(_multiply, dtype, min(max(rows, MIN_TILE_ROWS), TILE_ROWS), out_features),
    )
    # The last tiles of the groups have left their marks on rows after them.
    return jnp.where(jnp.arange(num_rows)[:, None] < jnp.sum(group_sizes), out, 0).astype(x.dtype)


def _multiply_on_cpu(
    tile_rows: int,
    x: Float[Array, "T D"],
    weights: Num[Array, "E F D"],
    group_sizes: Int[Array, " E"],
    scales: Float[Array, "E F"],
) -> Float[Array, "T F"]:
    """In float32, the type that XLA's CPU products are fast in; weights are converted as they are copied."""
    part = max(CPU_PART_BYTES // (4 * weights.shape[2]), 64)
    return _multiply(jnp.float32, tile_rows, part, x, weights, group_sizes, scales, on_cpu=True)


def _multiply(
    dtype: jnp.dtype,
    tile_rows: int,
    part: int,
    x: Float[Array, "T D"],
    weights: Num[Array, "E F D"],
    group_sizes: Int[Array, " E"],
    scales: Float[Array, "E F"],
    on_cpu: bool = False,
) -> Float[Array, "T F"]:
    """The products of ``dtype``, and garbage in padding rows; ``part`` channels and ``tile_rows`` rows at a time."""
    num_rows, in_features = x.shape
    num_groups, out_features, _ = weights.shape
    part = min(part, out_features)
    num_parts = -(-out_features // part)
    starts = jnp.cumsum(group_sizes) - group_sizes
    groups = jnp.nonzero(group_sizes, size=num_groups, fill_value=0)[0]
    x = jnp.pad(x, ((0, tile_rows), (0, 0))).astype(dtype)
    scales = scales.astype(jnp.float32)

    def read(weights: Array, group: Array, first: Array) -> Array:
        return lax.dynamic_slice(weights, (group, first, 0), (1, part, in_features))[0].astype(dtype)

    def one_group(index: Int[Array, ""], out: Float[Array, "T F"]) -> Float[Array, "T F"]:
        group = groups[index]
        num_tiles = (group_sizes[group] + tile_rows - 1) // tile_rows

        def one_part(index: Int[Array, ""], out: Float[Array, "T F"]) -> Float[Array, "T F"]:
            first = jnp.minimum(index * part, out_features - part)
            if on_cpu and weights.dtype != dtype:
                # Always true. Elsewhere than in a branch, XLA's CPU compiler turns "convert what was read" into "read
                # what was converted", and converts all weights before the loop.
                matrix = lax.cond(
                    num_tiles > 0, read, lambda *_: jnp.zeros((part, in_features), dtype), weights, group, first
                )
            else:
                matrix = read(weights, group, first)
            factors = lax.dynamic_slice(scales, (group, first), (1, part))

            def one_tile(index: Int[Array, ""], out: Float[Array, "T F"]) -> Float[Array, "T F"]:
                # In ascending order: what a tile writes past the end of its group, the next group overwrites.
                row = starts[group] + index * tile_rows
                tile = lax.dynamic_slice(x, (row, 0), (tile_rows, in_features))
                products = _weight_on_the_left(tile, matrix) if on_cpu else _weight_on_the_right(tile, matrix)
                return lax.dynamic_update_slice(out, products * factors, (row, first))

            return lax.fori_loop(0, num_tiles, one_tile, out)

        return lax.fori_loop(0, num_parts, one_part, out)

    out = jnp.zeros((num_rows + tile_rows, out_features), jnp.float32)
    return lax.fori_loop(0, jnp.sum(group_sizes > 0), one_group, out)[:num_rows]


def _weight_on_the_right(x: Float[Array, "T D"], matrix: Float[Array, "F D"]) -> Float[Array, "T F"]:
    return lax.dot_general(
        x,
        matrix,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _weight_on_the_left(x: Float[Array, "T D"], matrix: Float[Array, "F D"]) -> Float[Array, "T F"]:
    # XLA's CPU matrix product repacks its operands on every call; with few rows it costs less in this order. The
    # barriers keep XLA from folding the transposes back in.
    columns = lax.optimization_barrier(x.T)
    products = lax.dot_general(matrix, columns, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return lax.optimization_barrier(products).T
