"""Changes of the paged cache in plain XLA operations, for any platform.

Owns the whole contract on every platform: it refuses no case. It must not know of any other implementation.

On GPU all this happens in place, on CPU for float32, float16 and int8. A CPU passes the whole cache through a copy for
float8, and for bfloat16 until JAX 0.12. On TPU XLA stores a few hundred tokens in place, but copies the whole cache,
twice, for more (2,048 of 8 KV heads), for 8-bit types in blocks of 32 tokens and more, and to write scales.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num, Shaped

from pallas_kernels.kv_cache_update.quantization import stored_rows


def write_kv(
    kv_cache: Num[Array, "num_blocks K block_size 2*H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    slot_mapping: Int[Array, " T"],
    kv_scales: Float[Array, "num_blocks 2 K block_size"] | None = None,
    *,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> Array | tuple[Array, Array]:
    """See ``pallas_kernels.write_kv``."""
    block_size = kv_cache.shape[2]
    if len(slot_mapping) == 1:
        # XLA turns a scatter of one row into a dynamic slice update, for which its CPU backend copies the whole cache.
        k, v, slot_mapping = (x.repeat(2, axis=0) for x in (k, v, slot_mapping))
    rows, scales = stored_rows(k, v, kv_cache.dtype, dynamic=kv_scales is not None, k_scale=k_scale, v_scale=v_scale)
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    kv_cache = _set(kv_cache, (blocks, slice(None), offsets), rows)
    if kv_scales is None or scales is None:
        return kv_cache
    return kv_cache, _set(kv_scales, (blocks, slice(None), slice(None), offsets), scales)


def copy_blocks(
    cache: Shaped[Array, "num_blocks ..."], sources: Int[Array, " n"], destinations: Int[Array, " n"]
) -> Shaped[Array, "num_blocks ..."]:
    """See ``pallas_kernels.copy_blocks``."""
    return scatter_blocks(cache, gather_blocks(cache, sources), destinations)


def gather_blocks(cache: Shaped[Array, "num_blocks ..."], block_ids: Int[Array, " n"]) -> Shaped[Array, "n ..."]:
    """See ``pallas_kernels.gather_blocks``."""
    return cache.at[block_ids].get(mode="promise_in_bounds")


def scatter_blocks(
    cache: Shaped[Array, "num_blocks ..."], blocks: Shaped[Array, "n ..."], block_ids: Int[Array, " n"]
) -> Shaped[Array, "num_blocks ..."]:
    """See ``pallas_kernels.scatter_blocks``."""
    return lax.platform_dependent(cache, blocks, block_ids, tpu=_scatter_in_turn, default=_scatter_at_once)


def _scatter_at_once(cache: Array, blocks: Array, block_ids: Array) -> Array:
    return _set(cache, (block_ids,), blocks)


def _scatter_in_turn(cache: Array, blocks: Array, block_ids: Array) -> Array:
    # Where the rows of a block do not fill the 128 lanes of a TPU, XLA prefers another layout for a scatter and copies
    # the cache.
    def store(index: Array, cache: Array) -> Array:
        return lax.dynamic_update_index_in_dim(cache, blocks[index], block_ids[index], 0)

    return lax.fori_loop(0, len(block_ids), store, cache)


def _set(cache: Array, index: tuple[Any, ...], values: Array) -> Array:
    def store(cache: Array, values: Array) -> Array:
        return cache.at[index].set(values, mode="promise_in_bounds")

    def store_bits(cache: Array, values: Array) -> Array:
        bits = store(lax.bitcast_convert_type(cache, jnp.int8), lax.bitcast_convert_type(values, jnp.int8))
        return lax.bitcast_convert_type(bits, cache.dtype)

    if cache.dtype.itemsize > 1 or cache.dtype == jnp.int8:
        return store(cache, values)
    # XLA's CPU backend would convert all of a float8 cache to float16 and back, which takes ten times as long as a copy
    # and changes the bits of NaN.
    return lax.platform_dependent(cache, values, cpu=store_bits, default=store)
