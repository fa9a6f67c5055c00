"""``quantized_matmul`` in plain jax.numpy, for every platform. Knows arrays and nothing of models."""

from __future__ import annotations

import functools
import operator

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.quantized_matmul.weight import decode_fp8, kind_of

CPU_TILE_ROWS = 128
"""Rows of the weight that are made real at a time on a CPU: few enough to stay in its caches."""


def quantized_matmul(
    x: Float[Array, "T D"],
    values: Num[Array, "F bytes"],
    scales: Float[Array, "..."],
    *,
    num_real: Int[Array, ""] | None = None,
) -> Float[Array, "T F"]:
    """See ``pallas_kernels.quantized_matmul``. For bfloat16, int4 weights are rounded to it after scaling."""
    del num_real
    return lax.platform_dependent(x, values, scales, cpu=_in_tiles, default=_at_once)


def _at_once(x: Float[Array, "T D"], values: Num[Array, "F bytes"], scales: Float[Array, "..."]) -> Float[Array, "T F"]:
    """One product, or two for int4, whose conversion of the weight XLA can make part of it."""
    is_int4 = kind_of(values.dtype) == "int4"
    numbers = _unpack(values, scales) if is_int4 else [values]
    product = functools.partial(
        lax.dot_general,
        dimension_numbers=(((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    y = functools.reduce(operator.add, map(product, _split(x, scales), [part.astype(x.dtype) for part in numbers]))
    return (y if is_int4 else y * scales).astype(x.dtype)


def _in_tiles(x: Float[Array, "T D"], values: Num[Array, "F bytes"], scales: Array) -> Float[Array, "T F"]:
    """A tile of the weight's rows after the other, in float32: at no time is the whole weight real.

    XLA's CPU matrix product is fastest for few tokens with the weight on the left; the barriers keep it there. They
    also keep the product of one token from becoming a loop that converts the weight element by element.
    """
    kind = kind_of(values.dtype)
    columns = lax.optimization_barrier([part.T for part in _split(x.astype(jnp.float32), scales)])
    if kind == "fp8":
        # As bytes, because XLA's CPU backend makes float8 float16 wherever it is sliced or goes through a loop.
        values = lax.bitcast_convert_type(values, jnp.int8)

    def tile(first: Array | int, rows: int) -> Float[Array, "rows T"]:
        stored = lax.dynamic_slice_in_dim(values, first, rows)
        factors = lax.dynamic_slice_in_dim(scales, first, rows, axis=-1)
        if kind == "int4":
            numbers = _unpack(stored, factors)
        else:
            numbers = [decode_fp8(stored) if kind == "fp8" else stored.astype(jnp.float32)]
        product = functools.partial(
            lax.dot_general, dimension_numbers=(((1,), (0,)), ((), ())), precision=lax.Precision.HIGHEST
        )
        y = functools.reduce(operator.add, map(product, lax.optimization_barrier(numbers), columns))
        return y if kind == "int4" else y * factors[:, None]

    num_rows = values.shape[0]
    whole, rest = divmod(num_rows, CPU_TILE_ROWS)
    tiles = []
    if whole:
        firsts = jnp.arange(whole, dtype=jnp.int32) * CPU_TILE_ROWS
        tiles.append(lax.map(lambda first: tile(first, CPU_TILE_ROWS), firsts).reshape(-1, x.shape[0]))
    if rest:
        tiles.append(tile(num_rows - rest, rest))
    y = jnp.concatenate(tiles) if len(tiles) > 1 else tiles[0]
    return lax.optimization_barrier(y).T.astype(x.dtype)


def _split(x: Float[Array, "T D"], scales: Array) -> list[Float[Array, "T columns"]]:
    """For int4, the columns of x that belong to the low halves of the bytes, and those of the high ones; else x."""
    if scales.ndim == 1:
        return [x]
    halves = x.reshape(x.shape[0], scales.shape[0], 2, -1)
    return [halves[:, :, part].reshape(x.shape[0], -1) for part in (0, 1)]


def _unpack(values: Num[Array, "F bytes"], scales: Float[Array, "G F"]) -> list[Float[Array, "F bytes"]]:
    """The real weight, in float32: the columns in low halves of bytes, and those in high ones.

    They are not put in order, which would cost as much as all else.
    """
    grouped, factors = values.reshape(values.shape[0], scales.shape[0], -1), scales.T[:, :, None]
    numbers = (grouped & 15, grouped >> 4)
    return [((part.astype(jnp.float32) - 8.0) * factors).reshape(values.shape) for part in numbers]
