"""``quantized_matmul`` for TPUs: a Pallas kernel that streams the stored weight and makes it real in VMEM.

Owns the kernel and the choice of its tiles; knows arrays only. It must not know which implementation is preferred.

Grid (tiles of the weight's rows, tiles of tokens, tiles of columns): Pallas's pipeline copies the blocks of the next
step while one is computed, and the cores of a megacore chip (v4, v5p) share the tiles of rows. The weight is read once
for all tokens where one tile holds them (up to 512), so that decode moves the stored bytes, scales and little else.

int8 and float8: a tile is converted to x's dtype, multiplied with x, and the sum is scaled.

int4: a byte holds a column of the first and one of the second half of its group, so that x is split by XLA, before the
kernel, into the columns of the low and of the high halves; no weight changes its lane. What 128 lanes of bytes hold are
several groups, whose sums need scales of their own:
    few tokens: every token is a row for each of these groups, with zeros in the lanes of the others. The rows that the
        matrix unit has to spare at this size keep the vector unit, which unpacks the weight, from scaling it as well.
    many tokens: the unpacked numbers are scaled and rounded to x's dtype, for the matrix unit has no rows to spare.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Num

from pallas_kernels import tiles
from pallas_kernels.quantized_matmul.weight import group_size_of, key_of

LANES = 128
MAX_TOKENS = 512
"""Tokens of a tile: enough products for a byte of the weight to keep the matrix unit busy."""
MAX_COLUMNS = 5120
"""Columns of a tile, if a multiple of 256 below divides them, and else all, up to:"""
MAX_WHOLE_COLUMNS = 32768
BLOCK_BYTES = 1 << 20
"""Stored bytes of a tile: copies long enough to be fast, and tiles enough that the first one, for which the kernel
waits, is a small part."""
MAX_ROWS = 512
SPARE_ROWS = 128
"""Rows of the matrix unit: int4 products of no more rows, counting each token once a group, are for few tokens."""
VMEM_BYTES = 48 * 2**20
"""Of VMEM, what a kernel may take: less than half of the least that chips since v5e have."""
SMALL_VMEM_BYTES = 16 * 2**20
"""What a v4 has: there, tiles have half as many tokens."""


class _Tile(NamedTuple):
    """The work of a step of the grid: sizes of its blocks; ``columns`` counts stored numbers, for int4 bytes."""

    rows: int
    tokens: int
    columns: int


class _Plan(NamedTuple):
    """The static side of a launch.

    Attributes:
        half: columns of half a group of int4; None for the other kinds.
        groups: rows that a token has, one for each group in 128 lanes; 1 unless this is int4 for few tokens.
    """

    tile: _Tile
    half: int | None
    groups: int
    num_column_tiles: int
    dtype: Any


def quantized_matmul(
    x: Float[Array, "T D"],
    values: Num[Array, "F bytes"],
    scales: Float[Array, "..."],
    *,
    num_real: Int[Array, ""] | None = None,
) -> Float[Array, "T F"]:
    """See ``pallas_kernels.quantized_matmul``.

    Raises:
        NotImplementedError: for a number of columns that neither is divided by a tile nor fits one.
    """
    del num_real
    num_tokens, (num_rows, row_bytes) = x.shape[0], values.shape
    group_size = group_size_of(values, scales)
    half = None if group_size is None else group_size // 2
    # Few tokens of int4: as many rows a token as there are groups in 128 lanes, in whole vectors.
    groups = 1 if half is None else min(LANES // half, row_bytes // half)
    padded = pl.cdiv(num_tokens, 32 // x.dtype.itemsize) * (32 // x.dtype.itemsize)
    if groups * padded > SPARE_ROWS:
        groups = 1
    tokens = padded if groups > 1 else num_tokens
    tile = tiles.pick(
        "quantized_matmul",
        "mosaic_tpu",
        key_of(x, values, scales),
        _tile(tokens, num_rows, row_bytes, 1 if half is None else 2, x.dtype),
        functools.partial(_fits, tokens, num_rows, row_bytes),
    )
    if groups > 1:
        tile = tile._replace(tokens=tokens)
    plan = _Plan(tile, half, groups, pl.cdiv(row_bytes, tile.columns), x.dtype)

    inputs = [x]
    if half is not None:
        x = jnp.pad(x, ((0, tokens - num_tokens), (0, 0)))
        low_and_high = x.reshape(tokens, -1, 2, half)
        inputs = [_by_group(low_and_high[:, :, part].reshape(tokens, -1), groups, half) for part in (0, 1)]
    x_block = (tile.tokens * groups, tile.columns)
    x_specs = [pl.BlockSpec(x_block, lambda f, t, d: (t, d))] * len(inputs)
    if half is None:
        scales, scales_spec = scales[None], pl.BlockSpec((1, tile.rows), lambda f, t, d: (0, f))
    elif groups > 1:
        scales = scales.reshape(plan.num_column_tiles, -1, num_rows)
        scales_spec = pl.BlockSpec((1, scales.shape[1], tile.rows), lambda f, t, d: (d, 0, f))
    else:  # a column of factors a group
        scales = jnp.swapaxes(scales.reshape(plan.num_column_tiles, -1, num_rows), 1, 2)
        scales_spec = pl.BlockSpec((1, tile.rows, scales.shape[2]), lambda f, t, d: (d, f, 0))

    real = pltpu.VMEM((tile.rows, tile.columns), x.dtype)
    y = pl.pallas_call(
        functools.partial(_kernel, plan),
        grid=(pl.cdiv(num_rows, tile.rows), pl.cdiv(tokens, tile.tokens), plan.num_column_tiles),
        in_specs=[*x_specs, pl.BlockSpec((tile.rows, tile.columns), lambda f, t, d: (f, d)), scales_spec],
        out_specs=pl.BlockSpec((tile.tokens, tile.rows), lambda f, t, d: (t, f)),
        out_shape=jax.ShapeDtypeStruct((tokens, num_rows), x.dtype),
        scratch_shapes=[pltpu.VMEM((tile.tokens, tile.rows), jnp.float32), [real] * len(inputs) if groups == 1 else []],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=min(VMEM_BYTES, _vmem_bytes())
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * tokens * groups * num_rows * row_bytes * len(inputs),
            bytes_accessed=values.size + 4 * scales.size + (x.size + tokens * num_rows) * x.dtype.itemsize,
            transcendentals=0,
        ),
        name="quantized_matmul",
    )(*inputs, values, scales)
    return y[:num_tokens]


def _tile(num_tokens: int, num_rows: int, row_bytes: int, columns_per_byte: int, dtype: Any) -> _Tile:
    """All columns, or the most that divide them: then sums stay in the matrix unit. As many rows as BLOCK_BYTES hold.

    Raises:
        NotImplementedError: if no number of columns fits.
    """
    most = MAX_COLUMNS // columns_per_byte
    columns = row_bytes
    if row_bytes > most:
        divisors = [size for size in range(LANES, most + 1, LANES) if row_bytes % size == 0]
        if divisors and divisors[-1] >= most // 4:
            columns = divisors[-1]
        elif row_bytes > MAX_WHOLE_COLUMNS // columns_per_byte:
            raise NotImplementedError(
                f"{row_bytes * columns_per_byte} columns, which no tile of a fitting size divides"
            )
    rows = min(MAX_ROWS, max(LANES, BLOCK_BYTES // columns // LANES * LANES))
    # Of a very long row, x takes most of VMEM: then fewer tokens.
    most_tokens = MAX_TOKENS if _vmem_bytes() > SMALL_VMEM_BYTES else MAX_TOKENS // 2
    tokens = most_tokens * 2 // dtype.itemsize
    while tokens * columns * columns_per_byte > most_tokens * MAX_COLUMNS:
        tokens //= 2
    return _Tile(min(rows, num_rows), min(tokens, num_tokens), columns)


def _vmem_bytes() -> int:
    """VMEM of the chip that this is traced for; what most have if that is not known."""
    try:
        return pltpu.get_tpu_info().vmem_capacity_bytes
    except ValueError:
        return 128 * 2**20


def _fits(num_tokens: int, num_rows: int, row_bytes: int, tile: _Tile) -> bool:
    """Whether blocks are whole vectors or all there is, and columns divide: garbage must not be summed."""
    columns_fit = tile.columns == row_bytes or (row_bytes % tile.columns == 0 and tile.columns % LANES == 0)
    rows_fit = tile.rows == num_rows or tile.rows % LANES == 0
    return columns_fit and rows_fit and (tile.tokens == num_tokens or tile.tokens % 32 == 0)


def _by_group(x: Float[Array, "T bytes"], groups: int, half: int) -> Float[Array, "rows bytes"]:
    """A row for each token and group of 128 lanes, token by token for each group, with zeros in the other lanes."""
    if groups == 1:
        return x
    owner = np.arange(x.shape[1]) // half % groups
    return jnp.concatenate([jnp.where(owner == group, x, 0) for group in range(groups)])


def _kernel(plan: _Plan, *refs: Any) -> None:
    num_inputs = 1 if plan.half is None else 2
    x_refs, (values, scales, out, sums, real) = refs[:num_inputs], refs[num_inputs:]

    # One tile of columns: the tile of rows is the last step's, and real already, after the first tile of tokens.
    if plan.groups == 1:
        pl.when((pl.program_id(1) == 0) | (plan.num_column_tiles > 1))(lambda: _make_real(plan, values, scales, real))
        added = _products(plan, [x[...] for x in x_refs], [weight[...] for weight in real])
    else:
        added = _sum_of_groups(plan, x_refs, values, scales)

    def finish(total: Array) -> None:
        out[...] = (total * scales[...] if plan.half is None else total).astype(out.dtype)

    if plan.num_column_tiles == 1:
        finish(added)
        return
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _() -> None:
        sums[...] = added

    @pl.when(step > 0)
    def _() -> None:
        sums[...] += added

    pl.when(step == plan.num_column_tiles - 1)(lambda: finish(sums[...]))


def _products(plan: _Plan, xs: Sequence[Array], weights: Sequence[Array]) -> Float[Array, "rows_of_x rows"]:
    """The sum of x times weight over the pairs."""
    product = functools.partial(
        lax.dot_general,
        dimension_numbers=(((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if plan.dtype == jnp.float32 else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )
    return functools.reduce(operator.add, map(product, xs, weights))


def _unpack(stored: Array) -> tuple[Float[Array, "rows bytes"], Float[Array, "rows bytes"]]:
    """The numbers in the low and in the high halves of bytes, in float32."""
    numbers = stored.astype(jnp.int32)
    return ((numbers & 15) - 8).astype(jnp.float32), ((numbers >> 4) - 8).astype(jnp.float32)


def _chunks(num_lanes: int) -> list[slice]:
    return [slice(first, min(first + LANES, num_lanes)) for first in range(0, num_lanes, LANES)]


def _make_real(plan: _Plan, values: Any, scales: Any, real: Any) -> None:
    """Fills the tile in x's dtype, one for each half of the bytes; for int4 scaled."""
    if plan.half is None:
        real[0][...] = values[...].astype(jnp.float32).astype(plan.dtype)
        return
    factors = scales[0]
    for lanes in _chunks(plan.tile.columns):
        owner = lax.div(lax.broadcasted_iota(jnp.int32, (1, lanes.stop - lanes.start), 1), plan.half)
        first = lanes.start // plan.half
        factor = factors[:, first : first + 1]
        for group in range(1, (lanes.stop - lanes.start) // plan.half):
            factor = jnp.where(owner >= group, factors[:, first + group : first + group + 1], factor)
        for part, numbers in zip(real, _unpack(values[:, lanes]), strict=True):
            part[:, lanes] = (numbers * factor).astype(plan.dtype)


def _sum_of_groups(plan: _Plan, x_refs: Any, values: Any, scales: Any) -> Float[Array, "T rows"]:
    """The product of few tokens with int4: rows of x of a group times its numbers, scaled."""
    assert plan.half is not None
    tokens = plan.tile.tokens
    total = jnp.zeros((tokens, plan.tile.rows), jnp.float32)
    for lanes in _chunks(plan.tile.columns):
        halves = [numbers.astype(plan.dtype) for numbers in _unpack(values[:, lanes])]
        sums = _products(plan, [x[:, lanes] for x in x_refs], halves)
        first = lanes.start // plan.half
        for group in range((lanes.stop - lanes.start) // plan.half):
            total += sums[group * tokens : (group + 1) * tokens] * scales[0, first + group : first + group + 1, :]
    return total
