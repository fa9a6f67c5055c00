"""Causal attention of a ragged batch of query tokens over a paged KV cache: the contract.

It owns the meaning of the arguments and their checks; it must not know how any implementation works, nor how one is
picked (``pallas_kernels.dispatch``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from pallas_kernels import dispatch

IMPLEMENTATIONS = ("mosaic_tpu", "mosaic_gpu", "triton", "native", "xla", "reference")
"""Modules of this folder: ``mosaic_tpu`` for TPU, ``mosaic_gpu`` (Hopper, Blackwell) and ``triton`` for NVIDIA GPUs,
``native`` for the CPU at hand; the other two for any platform."""
KV_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")


class AttentionMetadata(NamedTuple):
    """Where the queries of each request are, and where its keys and values lie.

    Attributes:
        block_tables: block ids of each request, position ``p`` lies in block ``block_tables[b, p // block_size]``.
            Entries past the request's last block are not read as data; they must be valid ids (0 is usual).
        seq_lens: tokens of each request in the cache, the queries of this call included; 0 for padding rows.
        cu_seqlens_q: query tokens of the requests before, so that request b owns queries
            ``cu_seqlens_q[b]:cu_seqlens_q[b + 1]``: its last ones by position. Padding rows own none, and so may any
            other row.
    """

    block_tables: Int[Array, "B max_blocks"]
    seq_lens: Int[Array, " B"]
    cu_seqlens_q: Int[Array, " B+1"]


def ragged_paged_attention(
    q: Float[Array, "T N H"],
    kv_cache: Num[Array, "num_blocks K block_size 2*H"],
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    kv_scales: Float[Array, "num_blocks 2 K block_size"] | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    implementation: str = "auto",
    platform: str | None = None,
) -> Float[Array, "T N H"]:
    """Softmax attention of every query over the keys of its own request at or before its position.

    Query head n reads KV head ``n // (N // K)``. Accumulation is float32 whatever the dtypes. The result of a request
    depends on nothing of the other requests, to the bit, within one implementation and shape.

    Args:
        q: queries, request after request; tokens past ``cu_seqlens_q[-1]`` are padding.
        kv_cache: the row of a slot holds the key in its first head_dim columns, the value in the others. The keys of
            the queries themselves are already written. Slots that no request owns may hold anything, NaN included. An
            element stands for itself times its scale.
        scale: factor on the dot products.
        sliding_window: a query at position p sees keys at ``p - sliding_window + 1`` to p; None means all.
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)``.
        sinks: a score for each query head, neither scaled nor capped, that takes part in the softmax of every query
            beside those of its keys and has the value zero (gpt-oss).
        kv_scales: the scale of each slot and KV head, for keys and for values (dynamic quantisation).
        k_scale, v_scale: the scale of all keys and that of all values (static quantisation); None means 1.
        implementation: one of ``IMPLEMENTATIONS``, or "auto" for the best that takes the case.
        platform: "cpu", "gpu" or "tpu", if this is traced for another one than the default device's.

    Returns:
        The attended values in q's dtype; zeros for padding tokens.

    Raises:
        ValueError: for arguments that do not fit each other, an unknown implementation or platform.
        NotImplementedError: if the implementation asked for does not take this case.
    """
    arrays, options = _arguments(
        q,
        kv_cache,
        metadata,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks,
        kv_scales=kv_scales,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    choice = dispatch.choose(
        "ragged_paged_attention", IMPLEMENTATIONS, arrays, options, implementation=implementation, platform=platform
    )
    return choice.function(**{name: None if x is None else jnp.asarray(x) for name, x in arrays.items()}, **options)


def explain(
    q: Any,
    kv_cache: Any,
    metadata: AttentionMetadata,
    *,
    implementation: str = "auto",
    platform: str | None = None,
    **options: Any,
) -> dispatch.Choice:
    """What ``ragged_paged_attention`` takes for these arguments and why not what it prefers; runs nothing.

    Arrays may be ``jax.ShapeDtypeStruct``. Printed, the result is a sentence.
    """
    return dispatch.choose(
        "ragged_paged_attention",
        IMPLEMENTATIONS,
        *_arguments(q, kv_cache, metadata, **options),
        implementation=implementation,
        platform=platform,
    )


def _arguments(
    q: Any,
    kv_cache: Any,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Any = None,
    kv_scales: Any = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays and other arguments of an implementation by name, checked."""
    shapes = [array.shape for array in metadata]
    num_rows, max_blocks = shapes[0]
    if shapes[1:] != [(num_rows,), (num_rows + 1,)] or not max_blocks:
        raise ValueError(
            "block_tables, seq_lens and cu_seqlens_q must have shapes [B, max_blocks], [B] and [B + 1], "
            f"got {', '.join(map(str, shapes))}"
        )
    num_heads, head_dim = q.shape[1:]
    num_blocks, num_kv_heads, block_size, row = kv_cache.shape
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}")
    if 2 * head_dim != row:
        raise ValueError(f"head_dim of q is {head_dim}, rows of kv_cache have {row} columns and not twice as many")
    if jnp.dtype(kv_cache.dtype).name not in KV_DTYPES:
        raise ValueError(f"kv_cache must be of one of {', '.join(KV_DTYPES)}, got {kv_cache.dtype}")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, got {sliding_window}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap must be above 0, got {soft_cap}")
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"sinks must have shape {(num_heads,)}, got {sinks.shape}")
    scales_shape = (num_blocks, 2, num_kv_heads, block_size)
    if kv_scales is not None and kv_scales.shape != scales_shape:
        raise ValueError(f"kv_scales must have shape {scales_shape}, got {kv_scales.shape}")
    if kv_scales is not None and (k_scale is not None or v_scale is not None):
        raise ValueError(f"kv_scales exclude k_scale and v_scale, got {k_scale} and {v_scale}")
    arrays = {"q": q, "kv_cache": kv_cache, **metadata._asdict(), "sinks": sinks, "kv_scales": kv_scales}
    options: dict[str, Any] = {"scale": scale, "sliding_window": sliding_window, "soft_cap": soft_cap}
    return arrays, options | {"k_scale": k_scale, "v_scale": v_scale}
