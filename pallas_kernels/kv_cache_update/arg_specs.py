"""Calls of the functions of ``kv_cache_update`` by shapes alone, for a model's sizes: what is compiled ahead of time.

Must not know how they work.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
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
    num_bytes,
    struct,
)
from pallas_kernels.geometries import Geometry
from pallas_kernels.kv_cache_update import IMPLEMENTATIONS, copy_blocks, gather_blocks, scatter_blocks, write_kv

NUM_MOVED_BLOCKS = 64


def cases(geometry: Geometry, platform: str, kv_dtypes: Sequence[str] = KV_DTYPES) -> list[Case]:
    """Writes of a decode and of a prefill step for the dtypes of the cache, and moves of blocks for each item size."""
    found = [case for kv_dtype in kv_dtypes for case in _writes(geometry, platform, kv_dtype)]
    by_size = {jnp.dtype(kv_dtype).itemsize: kv_dtype for kv_dtype in reversed(kv_dtypes)}
    return found + [case for kv_dtype in by_size.values() for case in _moves(geometry, platform, kv_dtype)]


def _writes(geometry: Geometry, platform: str, kv_dtype: str) -> list[Case]:
    found = []
    steps = {"decode": NUM_REQUESTS}
    if kv_dtype in PREFILL_KV_DTYPES:
        steps["prefill"] = PREFILL_TOKENS
    for step, num_tokens in steps.items():
        dtype = "float32" if kv_dtype == "float32" else "bfloat16"
        new = struct((num_tokens, geometry.num_kv_heads, geometry.head_dim), dtype)
        arguments = _cache(geometry, platform, kv_dtype)
        slot_bytes = num_bytes(arguments) // (arguments["kv_cache"].shape[0] * block_size_on(platform, kv_dtype))
        arguments |= {"k": new, "v": new, "slot_mapping": struct((num_tokens,), jnp.int32)}
        found.append(
            Case(
                operation="write_kv",
                model=geometry.name,
                size=geometry.heads,
                shape=f"{step} {num_tokens}",
                dtype=kv_dtype,
                function=write_kv,
                arguments=arguments,
                options={},
                implementations=IMPLEMENTATIONS,
                donated=tuple(name for name in arguments if name.startswith("kv_")),
                minimum_bytes=2 * num_bytes(new) + num_tokens * slot_bytes,
            )
        )
    return found


def _moves(geometry: Geometry, platform: str, kv_dtype: str) -> list[Case]:
    cache = _cache(geometry, platform, kv_dtype)["kv_cache"]
    ids = struct((NUM_MOVED_BLOCKS,), jnp.int32)
    blocks = struct((NUM_MOVED_BLOCKS, *cache.shape[1:]), cache.dtype)
    calls = {
        copy_blocks: {"cache": cache, "sources": ids, "destinations": ids},
        gather_blocks: {"cache": cache, "block_ids": ids},
        scatter_blocks: {"cache": cache, "blocks": blocks, "block_ids": ids},
    }
    return [
        Case(
            operation=function.__name__,
            model=geometry.name,
            size=geometry.heads,
            shape=f"{NUM_MOVED_BLOCKS} blocks",
            dtype=kv_dtype,
            function=function,
            arguments=arguments,
            options={},
            implementations=IMPLEMENTATIONS,
            donated=() if function is gather_blocks else ("cache",),
            minimum_bytes=2 * num_bytes(blocks),
        )
        for function, arguments in calls.items()
    ]


def _cache(geometry: Geometry, platform: str, kv_dtype: str) -> dict[str, jax.ShapeDtypeStruct]:
    block_size = block_size_on(platform, kv_dtype)
    num_blocks = NUM_REQUESTS * CONTEXT_TOKENS // block_size + 1
    heads = geometry.num_kv_heads
    arguments = {"kv_cache": struct((num_blocks, heads, block_size, 2 * geometry.head_dim), kv_dtype)}
    if is_quantized(kv_dtype):
        arguments["kv_scales"] = struct((num_blocks, 2, heads, block_size), jnp.float32)
    return arguments
