"""Writes new keys and values into the paged cache."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int


def write_kv(
    kv_cache: Float[Array, "num_blocks 2 K block_size H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    slot_mapping: Int[Array, " T"],
) -> Float[Array, "num_blocks 2 K block_size H"]:
    """The cache with token t's key and value stored at ``slot_mapping[t]``.

    Args:
        slot_mapping: ``block_id * block_size + offset``. Padding tokens point into the scratch block 0, where what is
            written does not matter; all other slots must be distinct.

    Returns:
        The updated cache, in place when the caller donates ``kv_cache``. Values are cast to the cache's dtype.
    """
    block_size = kv_cache.shape[3]
    kv = jax.numpy.stack([k, v], axis=1).astype(kv_cache.dtype)
    if len(kv) == 1:
        # XLA turns a scatter of one row into a dynamic slice update, for which its CPU backend copies the whole cache.
        kv, slot_mapping = kv.repeat(2, axis=0), slot_mapping.repeat(2)
    return kv_cache.at[slot_mapping // block_size, :, :, slot_mapping % block_size].set(kv, mode="promise_in_bounds")
