"""Grouped matrix products for NVIDIA GPUs (sm80, sm89, sm90) in Pallas-Triton: the kernel, its tiles and its launch.

It must not know models, experts or which implementation is preferred where; it only refuses what it cannot do.

Every program makes one tile of the output: some rows of one group and some output channels. Tiles of rows start where
their group starts, so that each belongs to one group and each row to one tile; XLA makes the list of tiles from the
group sizes. Padding rows are a last group, whose tiles multiply nothing and write zeros. Programs of the same rows and
neighbouring channels run together: the rows stay in the cache while the weights of their group pass once.

Bytes: the weights of a group once for each of its tiles of rows, of which few rows have one and many find them in the
cache; never those of an empty group. Few rows are bound by these reads, many by the tensor cores. Quantised weights are
converted to the type of the products (exact) in registers, and their scales multiply the float32 sums.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int, Num

from pallas_kernels import tiles
from pallas_kernels.targets import compute_capability

MIN_SIDE = 16
"""Least side of a tensor-core product."""
FP8_CAPABILITY = 8.9
"""GPUs from here on convert float8_e4m3fn; for others compilers abort, so that it is decoded by bit operations."""


class _Tile(NamedTuple):
    """The work of a program: rows, output channels, and the input features of one step of its loop."""

    rows: int
    channels: int
    depth: int
    num_warps: int
    num_stages: int


def grouped_matmul(
    x: Float[Array, "T D"],
    weights: Num[Array, "E F D"],
    group_sizes: Int[Array, " E"],
    *,
    scales: Float[Array, "E F"] | None = None,
    interpret: bool = False,
) -> Float[Array, "T F"]:
    """See ``pallas_kernels.grouped_matmul``; ``interpret`` runs the kernel in XLA on any platform.

    Raises:
        NotImplementedError: for arrays larger than the Triton backend addresses.
    """
    num_rows, in_features = x.shape
    num_groups, out_features, _ = weights.shape
    if weights.dtype.itemsize == 1 and 2**31 < weights.size <= 2**32:
        # Pallas addresses arrays up to 4 GiB by signed 32-bit element offsets.
        raise NotImplementedError(f"one-byte weights of {weights.size} elements, between 2^31 and 2^32")
    dtype = jnp.float32 if jnp.float32 in (x.dtype, weights.dtype) else jnp.bfloat16
    tile = tiles.pick(
        "grouped_matmul",
        "triton",
        f"T{num_rows} E{num_groups} F{out_features} D{in_features} {x.dtype} {weights.dtype}",
        _tile(num_rows, num_groups, out_features, in_features, jnp.dtype(dtype)),
        _fits,
    )
    groups, firsts, ends = _row_tiles(group_sizes, num_rows, tile.rows)
    if len(groups) > 65535:
        raise NotImplementedError(f"{len(groups)} tiles of rows: a CUDA grid has at most 65535")
    capability = None if interpret else compute_capability()
    decodes_fp8 = weights.dtype == jnp.float8_e4m3fn and (capability or 0.0) < FP8_CAPABILITY
    operands = [x, weights, groups, firsts, ends]
    if scales is not None:
        operands.append(scales.astype(jnp.float32))
    return pl.pallas_call(
        functools.partial(_kernel, tile, jnp.dtype(dtype), decodes_fp8),
        # Neighbouring programs differ in the first index.
        grid=(pl.cdiv(out_features, tile.channels), len(groups)),
        out_shape=jax.ShapeDtypeStruct((num_rows, out_features), x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=interpret,
        name="grouped_matmul_kernel",
    )(*operands)


def _tile(num_rows: int, num_groups: int, out_features: int, in_features: int, dtype: Any) -> _Tile:
    """Rows of an average group, within bounds. Few rows want many programs, each with long reads of weights on their
    way; many rows want large products. All fit the 99 KiB of shared memory that the smallest GPUs have."""
    rows = min(max(pl.next_power_of_2(pl.cdiv(num_rows, num_groups)), MIN_SIDE), 128)
    if dtype == jnp.float32:  # without tensor cores, from registers
        tile = _Tile(min(rows, 32), 64, 32, num_warps=4, num_stages=2)
    elif rows == MIN_SIDE:
        tile = _Tile(rows, 64, 128, num_warps=4, num_stages=4)
    elif rows <= 64:
        tile = _Tile(rows, 128, 64, num_warps=4, num_stages=3)
    else:
        tile = _Tile(rows, 128, 64, num_warps=8, num_stages=3)
    return tile._replace(
        channels=min(tile.channels, max(pl.next_power_of_2(out_features), MIN_SIDE)),
        depth=min(tile.depth, max(pl.next_power_of_2(in_features), 2 * MIN_SIDE)),
    )


def _fits(tile: _Tile) -> bool:
    """Whether Triton takes the tile, but for the shared memory of the chip."""
    sides = (tile.rows, tile.channels, tile.depth)
    return min(sides) >= MIN_SIDE and all(number & (number - 1) == 0 for number in (*sides, tile.num_warps))


def _row_tiles(
    group_sizes: Int[Array, " E"], num_rows: int, tile_rows: int
) -> tuple[Int[Array, " tiles"], Int[Array, " tiles"], Int[Array, " tiles"]]:
    """Group, first row and end of the group of each tile; group E is the padding, unused tiles have no rows."""
    num_groups = len(group_sizes)
    total = jnp.sum(group_sizes)
    sizes = jnp.append(group_sizes, num_rows - total)
    ends = jnp.cumsum(sizes)
    counts = (sizes + tile_rows - 1) // tile_rows
    tile_ends = jnp.cumsum(counts)
    index = jnp.arange(num_rows // tile_rows + min(num_groups + 1, num_rows))
    # All pairs are compared: a binary search would be a loop, which XLA on GPUs drives from the host.
    group = jnp.minimum(jnp.sum(tile_ends[None, :] <= index[:, None], axis=1), num_groups)
    first = (ends - sizes)[group] + (index - (tile_ends - counts)[group]) * tile_rows
    first = jnp.where(index < tile_ends[-1], first, num_rows)
    return group.astype(jnp.int32), first.astype(jnp.int32), ends[group].astype(jnp.int32)


def _kernel(
    tile: _Tile,
    dtype: Any,
    decodes_fp8: bool,
    x_ref: Any,
    weights_ref: Any,
    groups_ref: Any,
    firsts_ref: Any,
    ends_ref: Any,
    *refs: Any,
) -> None:
    """One tile of the output."""
    *scale_refs, out_ref = refs
    num_groups, out_features, in_features = weights_ref.shape
    item = pl.program_id(1)
    group, first, end = groups_ref[item], firsts_ref[item], ends_ref[item]
    is_real = (group < num_groups) & (first < end)
    group = jnp.minimum(group, num_groups - 1)
    row = first + lax.iota(jnp.int32, tile.rows)
    channel = pl.program_id(0) * tile.channels + lax.iota(jnp.int32, tile.channels)

    def step(index: Array, sums: Array) -> Array:
        feature = index * tile.depth + lax.iota(jnp.int32, tile.depth)
        rows, features, mask = _grid(row, row < end, feature, feature < in_features)
        x = plgpu.load(x_ref.at[rows, features], mask=mask, other=0.0).astype(dtype)
        channels, features, mask = _grid(channel, channel < out_features, feature, feature < in_features)
        at = jnp.full_like(channels, group), channels, features
        stored = plgpu.load(weights_ref.at[at], mask=mask, other=jnp.zeros(channels.shape, weights_ref.dtype))
        return sums + lax.dot_general(
            x,
            _converted(stored, dtype, decodes_fp8),
            (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )

    num_steps = is_real.astype(jnp.int32) * pl.cdiv(in_features, tile.depth)
    bounds = jnp.zeros_like(num_steps), num_steps  # of one type: Triton's loop wants it
    sums = lax.fori_loop(*bounds, step, jnp.zeros((tile.rows, tile.channels), jnp.float32))
    if scale_refs:
        at = jnp.full_like(channel, group), channel
        sums = sums * plgpu.load(scale_refs[0].at[at], mask=(channel < out_features) & is_real, other=0.0)[None, :]
    rows, channels, mask = _grid(row, row < end, channel, channel < out_features)
    plgpu.store(out_ref.at[rows, channels], sums.astype(out_ref.dtype), mask=mask)


def _grid(row: Array, is_row: Array, column: Array, is_column: Array) -> tuple[Array, Array, Array]:
    """Indices of a matrix of rows and columns, and the mask of what exists."""
    shape = (len(row), len(column))
    rows, are_rows = (lax.broadcast_in_dim(vector, shape, (0,)) for vector in (row, is_row))
    columns, are_columns = (lax.broadcast_in_dim(vector, shape, (1,)) for vector in (column, is_column))
    return rows, columns, are_rows & are_columns


def _converted(stored: Array, dtype: Any, decodes_fp8: bool) -> Array:
    """Stored weights in the type of the products, without loss."""
    if not decodes_fp8:
        return stored.astype(dtype)
    # The seven bits of exponent and mantissa, shifted, are a float16 whose exponent is biased by 8 more.
    bits = lax.bitcast_convert_type(stored, jnp.int8).astype(jnp.int16)
    halves = lax.bitcast_convert_type(((bits & 0x80) << 8) | ((bits & 0x7F) << 7), jnp.float16)
    values = halves.astype(jnp.float32) * 256.0
    return jnp.where((bits & 0x7F) == 0x7F, jnp.nan, values).astype(dtype)
