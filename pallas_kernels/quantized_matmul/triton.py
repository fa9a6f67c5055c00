"""``quantized_matmul`` for NVIDIA GPUs (sm80 and later) in Pallas-Triton: the kernel, its tiles and its launch.

It must not know models, engines or which implementation is preferred where; it only refuses what it cannot do.

Grid (tiles of tokens, tiles of the weight's rows, splits of the columns). A program walks its columns step by step:
stored numbers are loaded, converted in registers and multiplied with x on the tensor cores, sums stay in float32. The
weight is the left operand, whose registers Hopper's matrix products read directly, so that what was converted need not
go through shared memory. int8 and float8 are scaled at the end; a step of int4 is one group, scaled as it is added.

Few tokens leave few programs: the columns are then split between several, which write partial sums in float32 that XLA
adds up. The weight is read once for each tile of tokens, so that for up to 64 tokens the bytes moved are those of the
weight, plus at most ``PARTIALS_SHARE`` of them for partial sums.
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
from pallas_kernels.quantized_matmul.weight import decode_fp8, group_size_of, key_of, kind_of
from pallas_kernels.targets import compute_capability

TARGET_PROGRAMS = 256
"""Programs that keep a large GPU (132 SMs) loading; splits of the columns make up for missing tiles."""
MIN_SPLIT_BYTES = 512
"""Of a weight's row, that a split should have: a few steps, for loads of one to overlap the products of another."""
PARTIALS_SHARE = 0.25
FP8_CAPABILITY = 8.9
"""GPUs from here on convert float8_e4m3fn; for others compilers abort, so that it is decoded by bit operations."""


def quantized_matmul(
    x: Float[Array, "T D"],
    values: Num[Array, "F bytes"],
    scales: Float[Array, "..."],
    *,
    num_real: Int[Array, ""] | None = None,
    interpret: bool = False,
) -> Float[Array, "T F"]:
    """See ``pallas_kernels.quantized_matmul``; ``interpret`` runs the kernel in XLA on any platform.

    Raises:
        NotImplementedError: for weights or activations too large to address.
    """
    del num_real
    if max(x.size, values.size, x.shape[0] * values.shape[0]) >= 2**31:
        raise NotImplementedError(f"x {x.shape} and values {values.shape}: offsets are 32-bit")
    group_size = group_size_of(values, scales)
    tile = tiles.pick(
        "quantized_matmul",
        "triton",
        key_of(x, values, scales),
        _tile(x, values, scales),
        functools.partial(_fits, None if group_size is None else group_size // 2),
    )
    num_tokens, num_rows = x.shape[0], values.shape[0]
    decodes_fp8 = kind_of(values.dtype) == "fp8" and ((not interpret and compute_capability()) or 0.0) < FP8_CAPABILITY
    out = jax.ShapeDtypeStruct((num_tokens, num_rows), x.dtype)
    if tile.splits > 1:
        out = jax.ShapeDtypeStruct((tile.splits, num_tokens, num_rows), jnp.float32)
    y = pl.pallas_call(
        functools.partial(_kernel, tile, decodes_fp8),
        grid=(pl.cdiv(num_tokens, tile.tokens), pl.cdiv(num_rows, tile.rows), tile.splits),
        out_shape=out,
        compiler_params=plgpu.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=interpret,
        name="quantized_matmul",
    )(x, values, scales)
    return y if tile.splits == 1 else jnp.sum(y, axis=0).astype(x.dtype)


class _Tile(NamedTuple):
    """The work of one program.

    Attributes:
        rows: of the weight.
        columns: stored numbers of a row in a step; for int4 the bytes of one group.
        splits: programs that share the columns.
    """

    tokens: int
    rows: int
    columns: int
    splits: int
    num_warps: int
    num_stages: int


def _tile(x: Any, values: Any, scales: Any) -> _Tile:
    """Few tokens: narrow tiles, many loads in flight. Many: what the registers hold of a square of sums.

    Steps are 128 bytes of a row, a line of the cache, where that divides the row.
    """
    num_tokens, (num_rows, row_bytes) = x.shape[0], values.shape
    group_size = group_size_of(values, scales)
    columns = next((size for size in (128, 64) if row_bytes % size == 0), 32)
    tokens, rows, num_warps, num_stages = max(16, pl.next_power_of_2(num_tokens)), 64, 4, 4
    if x.dtype == jnp.float32:  # products without tensor cores, and operands of twice the size
        tokens, rows, columns, num_stages = min(tokens, 32), 32, min(columns, 32), 2
    elif num_tokens > 64:
        tokens, rows, columns, num_warps, num_stages = 128, 128, min(columns, 64), 8, 3
    if group_size is not None:
        columns = group_size // 2
    programs = pl.cdiv(num_tokens, tokens) * pl.cdiv(num_rows, rows)
    most = min(row_bytes // max(MIN_SPLIT_BYTES, columns), int(PARTIALS_SHARE * row_bytes / (8 * num_tokens)))
    splits = 1 << max(1, min(TARGET_PROGRAMS // programs, most)).bit_length() - 1
    return _Tile(tokens, rows, columns, splits, num_warps, num_stages)


def _fits(half_group: int | None, tile: _Tile) -> bool:
    """Whether Triton takes a tile: powers of two, products of at least 16, a step of int4 one group."""
    powers = (tile.tokens, tile.rows, tile.columns, tile.num_warps)
    if any(size & (size - 1) for size in powers) or min(tile.tokens, tile.rows, tile.columns) < 16:
        return False
    return half_group in (None, tile.columns) and max(tile.tokens, tile.rows, tile.columns) <= 256


def _kernel(tile: _Tile, decodes_fp8: bool, x_ref: Any, values_ref: Any, scales_ref: Any, out_ref: Any) -> None:
    num_tokens, (num_rows, row_bytes) = x_ref.shape[0], values_ref.shape
    is_int4 = kind_of(values_ref.dtype) == "int4"
    tokens = pl.program_id(0) * tile.tokens + lax.iota(jnp.int32, tile.tokens)
    rows = pl.program_id(1) * tile.rows + lax.iota(jnp.int32, tile.rows)
    row_exists = rows < num_rows
    steps = pl.cdiv(row_bytes, tile.columns)
    steps_per_split = pl.cdiv(steps, tile.splits)
    first = pl.program_id(2) * steps_per_split
    precision = lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None

    def load(ref: Any, lines: Array, columns: Array, width: int) -> Array:
        """Elements [lines, columns] of a matrix; zeros outside."""
        shape = lines.shape[0], columns.shape[0]
        line, column = lax.broadcast_in_dim(lines, shape, (0,)), lax.broadcast_in_dim(columns, shape, (1,))
        exists = line < ref.shape[0]
        if width % tile.columns:
            exists &= column < width
        return plgpu.load(ref.at[line, column], mask=exists, other=jnp.zeros(shape, ref.dtype))

    def product(numbers: Array, columns: Array, width: int) -> Float[Array, "rows tokens"]:
        return lax.dot_general(
            numbers.astype(x_ref.dtype),
            load(x_ref, tokens, columns, width),
            (((1,), (1,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )

    def one_step(step: Array, total: Float[Array, "rows tokens"]) -> Float[Array, "rows tokens"]:
        columns = step * tile.columns + lax.iota(jnp.int32, tile.columns)
        stored = load(values_ref, rows, columns, row_bytes)
        if not is_int4:
            return total + product(
                decode_fp8(lax.bitcast_convert_type(stored, jnp.int8)) if decodes_fp8 else stored, columns, row_bytes
            )
        # The low halves of a group's bytes are its first columns, the high halves the others.
        columns += step * tile.columns
        low, high = (stored & 15).astype(jnp.int8) - 8, (stored >> 4).astype(jnp.int8) - 8
        added = product(low, columns, 2 * row_bytes) + product(high, columns + tile.columns, 2 * row_bytes)
        scales = plgpu.load(scales_ref.at[jnp.full_like(rows, step), rows], mask=row_exists, other=0.0)
        return total + added * scales[:, None]

    nothing = jnp.zeros((tile.rows, tile.tokens), jnp.float32)
    total = lax.fori_loop(first, jnp.minimum(first + steps_per_split, steps), one_step, nothing)
    if not is_int4:
        total *= plgpu.load(scales_ref.at[rows], mask=row_exists, other=0.0)[:, None]
    index = lax.broadcast_in_dim(tokens, nothing.shape, (1,)), lax.broadcast_in_dim(rows, nothing.shape, (0,))
    if tile.splits > 1:
        index = (jnp.full_like(index[0], pl.program_id(2)), *index)
    exists = (tokens < num_tokens)[None, :] & row_exists[:, None]
    plgpu.store(out_ref.at[index], total.astype(out_ref.dtype), mask=exists)
