"""Other attention code of JAX on the data of a case, to be timed beside the kernels: dense, and paged on GPUs.

It owns how they are called; what does not fit them, they raise themselves.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels import AttentionMetadata

Rival = Callable[[], Array]
"""Computes the attention of the case, [T, N, H]."""


def rivals(
    platform: str, q: Array, kv_cache: Array, metadata: AttentionMetadata, *, context: int, scale: float
) -> dict[str, Callable[[], Rival]]:
    """Functions by name that prepare the data, which may raise anything, and return what is to be timed."""
    data = functools.partial(_dense, q, kv_cache, metadata, context=context, scale=scale)
    found: dict[str, Callable[[], Rival]] = {"jax dense xla": functools.partial(data, "xla")}
    if platform == "gpu":
        found["jax dense cudnn"] = functools.partial(data, "cudnn")
        if len(q) == len(metadata.seq_lens):
            found["jax paged_attention"] = functools.partial(jax_paged, q, kv_cache, metadata, scale=scale)
    return found


def _dense(
    q: Array, kv_cache: Array, metadata: AttentionMetadata, implementation: Any, *, context: int, scale: float
) -> Rival:
    """``jax.nn.dot_product_attention`` over keys and values laid out end to end beforehand."""
    num_requests = len(metadata.seq_lens)
    head_dim = q.shape[-1]
    num_queries = len(q) // num_requests
    if num_queries not in (1, context):
        raise NotImplementedError("its causal mask is for queries from position 0")

    @jax.jit
    def laid_out(kv_cache: Array, tables: Array) -> tuple[Array, Array]:
        blocks = jnp.moveaxis(kv_cache[tables], 2, 3)  # [B, blocks, block_size, K, 2 H]
        both = blocks.reshape(num_requests, -1, *blocks.shape[3:])[:, :context]
        return both[..., :head_dim], both[..., head_dim:]

    keys, values = laid_out(kv_cache, metadata.block_tables)
    queries = q.reshape(num_requests, num_queries, *q.shape[1:])
    attend = functools.partial(
        jax.nn.dot_product_attention, scale=scale, is_causal=num_queries > 1, implementation=implementation
    )
    compiled = jax.jit(lambda *operands: attend(*operands).reshape(q.shape)).lower(queries, keys, values).compile()
    return lambda: compiled(queries, keys, values)


def jax_paged(
    q: Array, kv_cache: Array, metadata: AttentionMetadata, *, scale: float, interpret: bool = False, **options: Any
) -> Rival:
    """JAX's own decode kernel for GPUs, which wants keys and values apart and KV heads first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

        head_dim = q.shape[-1]
        keys, values = (jnp.moveaxis(half, 1, 0) for half in (kv_cache[..., :head_dim], kv_cache[..., head_dim:]))
        call = jax.jit(
            lambda q, keys, values, tables, lens: paged_attention(
                q * jnp.asarray(scale, q.dtype), keys, values, tables, lens, interpret=interpret, **options
            )
        )
        operands = (q, keys, values, metadata.block_tables, metadata.seq_lens)
        compiled = call.lower(*operands).compile()
    return lambda: compiled(*operands)
