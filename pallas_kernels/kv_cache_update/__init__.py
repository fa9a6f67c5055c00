"""Changes one layer's paged cache: writes new keys and values, copies blocks, takes blocks out and puts them in.

Knows arrays and block ids only: which request owns a block is decided elsewhere.
"""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int


def write_kv(
    kv_cache: Float[Array, "num_blocks K block_size 2*H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    slot_mapping: Int[Array, " T"],
) -> Float[Array, "num_blocks K block_size 2*H"]:
    """The cache with token t's key and value stored at ``slot_mapping[t]``.

    Args:
        slot_mapping: ``block_id * block_size + offset``. Padding tokens point into the scratch block 0, where what is
            written does not matter; all other slots must be distinct.

    Returns:
        The updated cache, in place when the caller donates ``kv_cache``. Values are cast to the cache's dtype.
    """
    block_size = kv_cache.shape[2]
    kv = jax.numpy.concatenate([k, v], axis=-1).astype(kv_cache.dtype)
    if len(kv) == 1:
        # XLA turns a scatter of one row into a dynamic slice update, for which its CPU backend copies the whole cache.
        kv, slot_mapping = kv.repeat(2, axis=0), slot_mapping.repeat(2)
    return kv_cache.at[slot_mapping // block_size, :, slot_mapping % block_size].set(kv, mode="promise_in_bounds")


def copy_blocks(
    kv_cache: Float[Array, "num_blocks K block_size 2*H"],
    sources: Int[Array, " n"],
    destinations: Int[Array, " n"],
) -> Float[Array, "num_blocks K block_size 2*H"]:
    """The cache with block ``destinations[i]`` holding what block ``sources[i]`` holds in ``kv_cache``.

    All sources are read before any destination is written: a block may be source and destination at once.

    Args:
        destinations: distinct, but for padding: entries whose source and destination are the scratch block 0.

    Returns:
        The updated cache, in place when the caller donates ``kv_cache``.
    """
    return scatter_blocks(kv_cache, gather_blocks(kv_cache, sources), destinations)


def gather_blocks(
    kv_cache: Float[Array, "num_blocks K block_size 2*H"], block_ids: Int[Array, " n"]
) -> Float[Array, "n K block_size 2*H"]:
    """A copy of the blocks, in the order of ``block_ids``. An id may appear more than once; 0 serves as padding."""
    return kv_cache.at[block_ids].get(mode="promise_in_bounds")


def scatter_blocks(
    kv_cache: Float[Array, "num_blocks K block_size 2*H"],
    blocks: Float[Array, "n K block_size 2*H"],
    block_ids: Int[Array, " n"],
) -> Float[Array, "num_blocks K block_size 2*H"]:
    """The cache with ``blocks[i]`` stored as block ``block_ids[i]``: undoes ``gather_blocks``.

    Args:
        blocks: in the cache's dtype.
        block_ids: distinct, but for padding, which points into the scratch block 0, whose content does not matter.

    Returns:
        The updated cache, in place when the caller donates ``kv_cache``.
    """
    return jax.lax.platform_dependent(kv_cache, blocks, block_ids, tpu=_scatter_in_turn, default=_scatter_at_once)


def _scatter_at_once(kv_cache: Array, blocks: Array, block_ids: Array) -> Array:
    return kv_cache.at[block_ids].set(blocks, mode="promise_in_bounds")


def _scatter_in_turn(kv_cache: Array, blocks: Array, block_ids: Array) -> Array:
    # Where head_dim is below the 128 lanes of a TPU, XLA prefers another layout for a scatter and copies the cache.
    def store(index: Array, kv_cache: Array) -> Array:
        return jax.lax.dynamic_update_index_in_dim(kv_cache, blocks[index], block_ids[index], 0)

    return jax.lax.fori_loop(0, len(block_ids), store, kv_cache)
