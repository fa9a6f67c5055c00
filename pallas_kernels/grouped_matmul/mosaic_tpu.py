"""Grouped matrix products for TPUs: a Pallas kernel that is told by scalars which weights each tile of rows takes.

Owns the kernel and the choice of its tiles; knows arrays only, neither experts nor adapters.

Work items (as in megablox, Gale et al., 2022): rows are cut into aligned tiles, and a tile that several groups share is
visited once for each, one after the other. A visit multiplies all rows of the tile and keeps those of its group; the
first one sets the others to zero. Tiles of nothing but padding are visited once and set to zero. XLA makes the list of
items from the group sizes, and the kernel reads it by scalars.

Grid: (tiles of output channels, items). The contraction is not cut, so that the weights of a group and channel tile are
copied from HBM once for all its rows (a block that the next step takes too is not copied again), those of an empty
group never; and so are the rows of a batch that fits one tile.

Bytes: the weights of the groups that have rows once, ``T * in_features`` values of x once for each tile of channels if
there are several tiles of rows, the output once. Few rows are bound by the weights, many by the matrix unit.
"""

from __future__ import annotations

import enum
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Num

from pallas_kernels import tiles

LANES = 128
MIN_ROWS, MAX_ROWS = 128, 512
"""Rows of a tile in a large batch. The matrix unit wants many; but the tile at each border of groups is computed for
both of them."""
WEIGHT_BYTES = 4 * 2**20
"""Bytes of a block of weights: copies this long run at full bandwidth, and a row is multiplied by hundreds of channels
each time it is read."""
VMEM_BYTES = 48 * 2**20
SMEM_BYTES = 512 * 1024
"""Of SMEM's 1 MiB, what the items may take."""


class _Item(enum.IntEnum):
    """What is known of a work item: the rows of the array of items, which has a column an item."""

    TILE = 0
    GROUP = 1
    FIRST_ROW, END_ROW = 2, 3  # the group's rows, counted in the tile; none for an item that only sets to zero


class _Tiles(NamedTuple):
    """Rows and output channels that one step multiplies."""

    rows: int
    channels: int


def grouped_matmul(
    x: Float[Array, "T D"],
    weights: Num[Array, "E F D"],
    group_sizes: Int[Array, " E"],
    *,
    scales: Float[Array, "E F"] | None = None,
) -> Float[Array, "T F"]:
    """See ``pallas_kernels.grouped_matmul``.

    The weights must lie in HBM with in_features as their fastest axis. That is XLA's own choice where in_features is a
    multiple of 128; elsewhere (adapters from a low rank) the caller should fix the layout of the jitted function's
    argument, or XLA copies all of them.

    Raises:
        NotImplementedError: if a block of weights does not fit VMEM, or the list of items SMEM.
    """
    num_rows, in_features = x.shape
    num_groups, out_features, _ = weights.shape
    dtype = jnp.float32 if jnp.float32 in (x.dtype, weights.dtype) else jnp.bfloat16
    shape = _Shape(num_rows, num_groups, out_features, in_features, x.dtype, weights.dtype)
    tile = tiles.pick("grouped_matmul", "mosaic_tpu", shape.key, _tiles(shape), shape.fits)
    items = _items(group_sizes, num_rows, tile.rows)
    if items.size * 4 > SMEM_BYTES:
        raise NotImplementedError(f"{items.shape[1]} tiles and groups do not fit SMEM")
    in_specs = [
        pl.BlockSpec((tile.rows, in_features), lambda channel, item, items: (items[_Item.TILE, item], 0)),
        pl.BlockSpec(
            (None, tile.channels, in_features), lambda channel, item, items: (items[_Item.GROUP, item], channel, 0)
        ),
    ]
    operands: list[Array] = [x, weights]
    if scales is not None:
        # A row of channels on an axis of its own: a block of one row of a matrix would not be a whole tile of it.
        operands.append(scales.astype(jnp.float32).reshape(num_groups, 1, out_features))
        in_specs.append(
            pl.BlockSpec((None, 1, tile.channels), lambda channel, item, items: (items[_Item.GROUP, item], 0, channel))
        )
    return pl.pallas_call(
        functools.partial(_kernel, dtype, tile.rows),
        out_shape=jax.ShapeDtypeStruct((num_rows, out_features), x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(out_features, tile.channels), items.shape[1]),
            in_specs=in_specs,
            out_specs=pl.BlockSpec(
                (tile.rows, tile.channels), lambda channel, item, items: (items[_Item.TILE, item], channel)
            ),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_vmem_bytes()
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_rows * out_features * in_features,
            bytes_accessed=x.nbytes + min(num_rows, num_groups) * (weights.nbytes // num_groups),
            transcendentals=0,
        ),
        name="grouped_matmul",
    )(items, *operands)


# --- tiles -----------------------------------------------------------------------------------------------------------


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _vmem_bytes() -> int:
    """VMEM that the kernel may take; the chip's is known where one is at hand or a mesh of the target is in use."""
    try:
        return min(VMEM_BYTES, pltpu.get_tpu_info().vmem_capacity_bytes * 3 // 4)
    except (AttributeError, IndexError, ValueError):
        return VMEM_BYTES


class _Shape(NamedTuple):
    """What tiles depend on."""

    num_rows: int
    num_groups: int
    out_features: int
    in_features: int
    x_dtype: Any
    weight_dtype: Any

    @property
    def key(self) -> str:
        """Its name in tables of tiles."""
        sizes = f"T{self.num_rows} E{self.num_groups} F{self.out_features} D{self.in_features}"
        return f"{sizes} {self.x_dtype} {self.weight_dtype}"

    @property
    def least_rows(self) -> int:
        """Rows of a vector register of x."""
        return 8 if self.x_dtype.itemsize == 4 else 16

    def fits(self, tile: _Tiles) -> bool:
        """Whether the kernel takes the tile, and VMEM holds it: blocks twice, for the next one's copy."""
        rows, channels = tile
        if rows % self.least_rows or (channels % LANES and channels != self.out_features):
            return False
        width = _round_up(self.in_features, LANES)
        weights = channels * width
        x_bytes, weight_bytes = self.x_dtype.itemsize, self.weight_dtype.itemsize
        blocks = 2 * (rows * width * x_bytes + weights * weight_bytes + rows * channels * x_bytes)
        converted = 0 if self.weight_dtype == self.x_dtype else 4 * weights
        return blocks + converted + 3 * 4 * rows * channels <= _vmem_bytes() * 7 // 8


def _tiles(shape: _Shape) -> _Tiles:
    """A tile of half an average group, within bounds; weights of WEIGHT_BYTES; both cut to what VMEM holds."""
    rows = min(max(shape.num_rows // shape.num_groups // 2, MIN_ROWS), MAX_ROWS, max(shape.num_rows, shape.least_rows))
    rows = 1 << (rows - 1).bit_length()
    row_bytes = _round_up(shape.in_features, LANES) * shape.weight_dtype.itemsize
    most = _round_up(shape.out_features, LANES)
    channels = min(max(WEIGHT_BYTES // row_bytes // LANES, 1) * LANES, most)
    while not shape.fits(_Tiles(rows, channels)):
        if channels > LANES and (channels >= rows or rows == shape.least_rows):
            channels = max(channels // 2 // LANES, 1) * LANES
        elif rows > shape.least_rows:
            rows //= 2
        else:
            raise NotImplementedError(f"weights of {shape.in_features} input features do not fit VMEM")
    if channels >= shape.out_features:
        return _Tiles(rows, shape.out_features)
    # Even shares: the last tile should not be nearly empty.
    return _Tiles(rows, _round_up(pl.cdiv(shape.out_features, pl.cdiv(shape.out_features, channels)), LANES))


def _items(group_sizes: Int[Array, " E"], num_rows: int, tile_rows: int) -> Int[Array, "fields items"]:
    """An item for each group in each tile that has rows of it, in order of rows; then the tiles of padding."""
    num_groups, num_tiles = len(group_sizes), -(-num_rows // tile_rows)
    ends = jnp.cumsum(group_sizes)
    starts = ends - group_sizes
    counts = jnp.where(group_sizes > 0, (ends - 1) // tile_rows - starts // tile_rows + 1, 0)
    item_ends = jnp.cumsum(counts)
    num_used = item_ends[-1]
    index = jnp.arange(num_tiles + min(num_groups, num_rows) - 1)
    # What comes after the used items stays with the last one's weights, which then are not copied again.
    used = jnp.minimum(index, jnp.maximum(num_used - 1, 0))
    # All pairs are compared: a binary search would be a loop.
    group = jnp.minimum(jnp.sum(item_ends[None, :] <= used[:, None], axis=1), num_groups - 1)
    is_used = index < num_used
    first_padding = (ends[-1] + tile_rows - 1) // tile_rows
    tile = jnp.where(
        is_used,
        starts[group] // tile_rows + index - (item_ends - counts)[group],
        jnp.minimum(first_padding + index - num_used, num_tiles - 1),
    )
    first = jnp.where(is_used, jnp.clip(starts[group] - tile * tile_rows, 0, tile_rows), 0)
    end = jnp.where(is_used, jnp.clip(ends[group] - tile * tile_rows, 0, tile_rows), 0)
    return jnp.stack([tile, group, first, end]).astype(jnp.int32)


# --- the kernel ------------------------------------------------------------------------------------------------------


def _kernel(dtype: Any, tile_rows: int, items_ref: Any, x_ref: Any, weights_ref: Any, *refs: Any) -> None:
    """One item and tile of channels."""
    *scale_refs, out_ref = refs
    item = pl.program_id(1)
    first, end = items_ref[_Item.FIRST_ROW, item], items_ref[_Item.END_ROW, item]
    before = jnp.maximum(item - 1, 0)
    is_first_visit = (item == 0) | (items_ref[_Item.TILE, item] != items_ref[_Item.TILE, before])

    @pl.when(first < end)
    def _() -> None:
        products = lax.dot_general(
            x_ref[...].astype(dtype),
            _converted(weights_ref[...], dtype),
            (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )
        if scale_refs:
            products = products * scale_refs[0][...]
        is_whole = (first == 0) & (end == tile_rows)

        @pl.when(is_whole)
        def _() -> None:
            out_ref[...] = products.astype(out_ref.dtype)

        @pl.when(jnp.logical_not(is_whole))
        def _() -> None:
            rows = lax.broadcasted_iota(jnp.int32, products.shape, 0)
            # What the first visit finds here is not initialised.
            others = jnp.where(is_first_visit, 0.0, out_ref[...].astype(jnp.float32))
            out_ref[...] = jnp.where((rows >= first) & (rows < end), products, others).astype(out_ref.dtype)

    @pl.when((first >= end) & is_first_visit)
    def _() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)


def _converted(weights: Array, dtype: Any) -> Array:
    """Weights in the type of the products, without loss; int8 goes by way of float32."""
    if weights.dtype == jnp.int8:
        weights = weights.astype(jnp.float32)
    return weights.astype(dtype)
