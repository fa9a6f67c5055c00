"""The float32 definition of ragged paged attention: one query at a time, no tricks. Slow; for tests.

It owns what the result is; it must not know of any device, tile or other means to get there fast.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num


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
    """See ``pallas_kernels.ragged_paged_attention``, which this function defines."""
    num_tokens, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = kv_cache.shape
    num_requests, max_blocks = block_tables.shape
    group = num_heads // num_kv_heads
    key_positions = jnp.arange(max_blocks * block_size)

    def real_values(block_table: Int[Array, " max_blocks"], which: int) -> Float[Array, "K S H"]:
        stored = kv_cache[block_table].reshape(max_blocks, num_kv_heads, block_size, 2, head_dim)[..., which, :]
        stored = stored.astype(jnp.float32)
        static_scale = (k_scale, v_scale)[which]
        if kv_scales is not None:
            stored = stored * kv_scales[block_table, which].astype(jnp.float32)[..., None]
        elif static_scale is not None:
            stored = stored * static_scale
        return jnp.moveaxis(stored, 1, 0).reshape(num_kv_heads, -1, head_dim)

    def one_query(token: Int[Array, ""]) -> Float[Array, "N H"]:
        request = jnp.clip(jnp.searchsorted(cu_seqlens_q, token, side="right") - 1, 0, num_requests - 1)
        position = seq_lens[request] - cu_seqlens_q[request + 1] + token
        visible = (key_positions <= position) & (token < cu_seqlens_q[-1])
        if sliding_window is not None:
            visible &= key_positions > position - sliding_window
        keys, values = (real_values(block_tables[request], which) for which in range(2))
        values = jnp.where(visible[None, :, None], values, 0.0)
        query = q[token].astype(jnp.float32).reshape(num_kv_heads, group, head_dim)
        scores = jnp.einsum("kgh,ksh->kgs", query, keys, precision="highest") * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(visible, scores, -jnp.inf)
        if sinks is not None:
            sink_scores = sinks.astype(jnp.float32).reshape(num_kv_heads, group, 1)
            scores = jnp.concatenate([scores, sink_scores], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., : len(key_positions)]
        weights = jnp.where(visible, weights, 0.0)
        return jnp.einsum("kgs,ksh->kgh", weights, values, precision="highest").reshape(num_heads, head_dim)

    return jax.lax.map(one_query, jnp.arange(num_tokens)).astype(q.dtype)
