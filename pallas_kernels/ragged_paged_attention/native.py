"""Ragged paged attention in C++ for the CPU at hand: keys and values are read where they lie in the cache.

A thread attends up to 32 queries of a request at a time, for all query heads of one KV head. Decode reads each visible
key and value once, so it moves the minimum of bytes beside tables, queries and results.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from pallas_kernels import native

HEAD_DIM_MULTIPLE = 16
"""The widest vectors of any CPU."""


def ragged_paged_attention(
    q: Float[Array, "T N H"],
    kv_cache: Num[Array, "num_blocks K block_size 2*H"],
    block_tables: Int[Array, "B max_blocks"],
    seq_lens: Int[Array, " B"],
    cu_seqlens_q: Int[Array, " B+1"],
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    kv_scales: Float[Array, "num_blocks 2 K block_size"] | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> Float[Array, "T N H"]:
    """See ``pallas_kernels.ragged_paged_attention``.

    Raises:
        NotImplementedError: for a head_dim that is no multiple of 16, a float16 cache, or without the library.
    """
    if q.shape[2] % HEAD_DIM_MULTIPLE:
        raise NotImplementedError(f"takes a head_dim that is a multiple of {HEAD_DIM_MULTIPLE}, got {q.shape[2]}")
    if q.dtype not in (jnp.float32, jnp.bfloat16) or kv_cache.dtype == jnp.float16:
        raise NotImplementedError(f"takes no float16, got queries of {q.dtype} and a cache of {kv_cache.dtype}")
    return native.call(
        "pallas_kernels_attention",
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        q,
        kv_cache,
        *(array.astype(jnp.int32) for array in (block_tables, seq_lens, cu_seqlens_q)),
        native.optional(sinks),
        native.optional(kv_scales),
        scale=float(scale * (1.0 if k_scale is None else k_scale)),
        out_scale=float(1.0 if v_scale is None else v_scale),
        soft_cap=float(soft_cap or 0.0),
        sliding_window=sliding_window or 0,
    )
