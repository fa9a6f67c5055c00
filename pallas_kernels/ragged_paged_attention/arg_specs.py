"""Calls of ``ragged_paged_attention`` by shapes alone, for a model's sizes: what is compiled ahead of time.

Must not know how any implementation works.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from pallas_kernels.case import (
    CONTEXT_TOKENS,
    KV_DTYPES,
    NUM_REQUESTS,
    PREFILL_KV_DTYPES,
    PREFILL_TOKENS,
    Case,
    block_size_on,
    is_quantized,
    struct,
)
from pallas_kernels.geometries import Geometry
from pallas_kernels.ragged_paged_attention import (
    IMPLEMENTATIONS,
    AttentionMetadata,
    ragged_paged_attention,
    traffic,
)


def cases(geometry: Geometry, platform: str, kv_dtypes: Sequence[str] = KV_DTYPES) -> list[Case]:
    """Decode and prefill for each dtype of the cache, and what a model has beside plain attention.

    Every case has room for ``NUM_REQUESTS`` requests of ``CONTEXT_TOKENS`` tokens. In decode there is one query each;
    prefill may be any mix of chunks and decode rows, for what a batch holds is not known when it is compiled.
    """
    decode, prefill = f"decode {NUM_REQUESTS} x {CONTEXT_TOKENS}", f"prefill {PREFILL_TOKENS}"
    found = []
    for kv_dtype in kv_dtypes:
        dynamic = is_quantized(kv_dtype)
        label = f"{kv_dtype} dynamic" if dynamic else kv_dtype
        found.append(_case(geometry, platform, decode, NUM_REQUESTS, kv_dtype, label, kv_scales=dynamic))
        if dynamic:
            static: dict[str, Any] = {"k_scale": 0.1, "v_scale": 0.1}
            found.append(_case(geometry, platform, decode, NUM_REQUESTS, kv_dtype, f"{kv_dtype} static", **static))
        if kv_dtype in PREFILL_KV_DTYPES:
            found.append(_case(geometry, platform, prefill, PREFILL_TOKENS, kv_dtype, label, kv_scales=dynamic))
    if geometry.sliding_window and "bfloat16" in kv_dtypes:
        window: dict[str, Any] = {"sliding_window": geometry.sliding_window}
        found.append(_case(geometry, platform, f"{decode}, window", NUM_REQUESTS, "bfloat16", "bfloat16", **window))
        window |= {"soft_cap": 30.0, "sinks": True}
        shape = f"{prefill}, window, cap, sinks"
        found.append(_case(geometry, platform, shape, PREFILL_TOKENS, "bfloat16", "bfloat16", **window))
    return found


def _case(
    geometry: Geometry,
    platform: str,
    shape: str,
    num_tokens: int,
    kv_dtype: str,
    label: str,
    *,
    kv_scales: bool = False,
    sinks: bool = False,
    **options: Any,
) -> Case:
    block_size = block_size_on(platform, kv_dtype)
    max_blocks = CONTEXT_TOKENS // block_size
    num_blocks = NUM_REQUESTS * max_blocks + 1
    q_dtype = "float32" if kv_dtype == "float32" else "bfloat16"
    arguments: dict[str, Any] = {
        "q": struct((num_tokens, geometry.num_heads, geometry.head_dim), q_dtype),
        "kv_cache": struct((num_blocks, geometry.num_kv_heads, block_size, 2 * geometry.head_dim), kv_dtype),
        "metadata": AttentionMetadata(
            block_tables=struct((NUM_REQUESTS, max_blocks), jnp.int32),  # pyright: ignore[reportArgumentType]
            seq_lens=struct((NUM_REQUESTS,), jnp.int32),  # pyright: ignore[reportArgumentType]
            cu_seqlens_q=struct((NUM_REQUESTS + 1,), jnp.int32),  # pyright: ignore[reportArgumentType]
        ),
    }
    if kv_scales:
        arguments["kv_scales"] = struct((num_blocks, 2, geometry.num_kv_heads, block_size), jnp.float32)
    if sinks:
        arguments["sinks"] = struct((geometry.num_heads,), q_dtype)
    minimum, moved = (None, {}) if num_tokens != NUM_REQUESTS else _decode_bytes(geometry, arguments, options)
    return Case(
        operation="ragged_paged_attention",
        model=geometry.name,
        size=geometry.heads,
        shape=shape,
        dtype=label,
        function=ragged_paged_attention,
        arguments=arguments,
        options={"scale": geometry.head_dim**-0.5, **options},
        implementations=IMPLEMENTATIONS,
        minimum_bytes=minimum,
        moved_bytes=moved,
    )


def _decode_bytes(
    geometry: Geometry, arguments: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[int, dict[str, int]]:
    """The least that a decode step moves where all requests are of full length, and what implementations do."""
    sizes: dict[str, Any] = {
        "num_kv_heads": geometry.num_kv_heads,
        "head_dim": geometry.head_dim,
        "kv_itemsize": arguments["kv_cache"].dtype.itemsize,
        "seq_lens": [CONTEXT_TOKENS] * NUM_REQUESTS,
        "sliding_window": options.get("sliding_window"),
        "has_scales": "kv_scales" in arguments,
    }
    minimum = traffic.minimum_bytes(**sizes)
    sizes |= {"num_heads": geometry.num_heads, "q_itemsize": arguments["q"].dtype.itemsize}
    sizes |= {"block_size": arguments["kv_cache"].shape[2], "max_blocks": arguments["metadata"].block_tables.shape[1]}
    names = [name for name in IMPLEMENTATIONS if name != "reference"]
    return minimum, {name: traffic.decode_bytes(name, **sizes) for name in names}
