"""Changes one layer's paged cache: writes new keys and values, copies blocks, takes blocks out and puts them in.

It owns the meaning of the arguments and their checks. Knows arrays and block ids only: which request owns a block is
decided elsewhere, and which implementation does the work in ``pallas_kernels.dispatch``.
"""

from __future__ import annotations

from typing import Any, overload

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num, Shaped

from pallas_kernels import dispatch
from pallas_kernels.kv_cache_update.quantization import is_quantized

IMPLEMENTATIONS = ("mosaic_tpu", "xla")
"""Modules of this folder: ``mosaic_tpu`` for TPU, ``xla`` for any platform. On TPU the first is preferred: what it does
is in place for every shape, whereas XLA copies the whole cache for some, and moves blocks one after the other."""


@overload
def write_kv(
    kv_cache: Num[Array, "num_blocks K block_size 2*H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    slot_mapping: Int[Array, " T"],
    *,
    kv_scales: None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    implementation: str = "auto",
    platform: str | None = None,
) -> Num[Array, "num_blocks K block_size 2*H"]: ...


@overload
def write_kv(
    kv_cache: Num[Array, "num_blocks K block_size 2*H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    slot_mapping: Int[Array, " T"],
    *,
    kv_scales: Float[Array, "num_blocks 2 K block_size"],
    k_scale: None = None,
    v_scale: None = None,
    implementation: str = "auto",
    platform: str | None = None,
) -> tuple[Num[Array, "num_blocks K block_size 2*H"], Float[Array, "num_blocks 2 K block_size"]]: ...


def write_kv(
    kv_cache: Num[Array, "num_blocks K block_size 2*H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    slot_mapping: Int[Array, " T"],
    *,
    kv_scales: Float[Array, "num_blocks 2 K block_size"] | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    implementation: str = "auto",
    platform: str | None = None,
) -> Array | tuple[Array, Array]:
    """The cache with token t's key and value stored at ``slot_mapping[t]``, the key in the first half of the row.

    A cache of int8, float8_e4m3fn or float8_e5m2 is quantised on the way: an element stands for itself times its scale.
    Stored is the real value over the scale, rounded to the nearest (ties to even) and clipped to the type's largest
    magnitude, 127, 448 or 57344. With dynamic scales, a value is off by at most 1/254 of the largest magnitude of its
    vector for int8; by 1/16 of itself for float8_e4m3fn and 1/8 for float8_e5m2, or by a 400,000th of the largest.

    Args:
        k, v: float32, bfloat16 or float16.
        slot_mapping: ``block_id * block_size + offset``. Padding tokens point into the scratch block 0, where what is
            written, if anything, does not matter; all other slots must be distinct. Nothing else changes by a bit.
        kv_scales: the scales of the cache's slots, for dynamic quantisation: each token and KV head gets one for its
            key and one for its value, their largest magnitude over the type's (0 for a vector of zeros, NaN or infinite
            for one that is not finite).
        k_scale, v_scale: the scale of all keys and that of all values, for static quantisation; None means 1.
        implementation: one of ``IMPLEMENTATIONS``, or "auto" for the best that takes the case.
        platform: "cpu", "gpu" or "tpu", if this is traced for another one than the default device's.

    Returns:
        The updated cache; a pair of it and the updated scales if ``kv_scales`` are given. In place when the caller
        donates what is updated. An unquantised cache holds the values cast to its dtype.

    Raises:
        ValueError: for arguments that do not fit each other, an unknown implementation or platform.
        NotImplementedError: if the implementation asked for does not take this case.
    """
    num_blocks, num_kv_heads, block_size, row = kv_cache.shape
    token_shape = (*slot_mapping.shape, num_kv_heads, row // 2)
    if k.shape != token_shape or v.shape != token_shape or row % 2 or slot_mapping.ndim != 1:
        raise ValueError(
            f"k and v must have shape {token_shape} for {slot_mapping.shape} slots of a cache of {kv_cache.shape}, "
            f"got {k.shape} and {v.shape}"
        )
    is_scaled = kv_scales is not None or k_scale is not None or v_scale is not None
    if is_scaled and not is_quantized(kv_cache.dtype):
        raise ValueError(f"scales are for quantised caches, got one of {kv_cache.dtype}")
    scales_shape = (num_blocks, 2, num_kv_heads, block_size)
    if kv_scales is not None and (kv_scales.shape != scales_shape or kv_scales.dtype != jnp.float32):
        raise ValueError(
            f"kv_scales must be float32 of shape {scales_shape}, got {kv_scales.dtype} of {kv_scales.shape}"
        )
    if kv_scales is not None and (k_scale is not None or v_scale is not None):
        raise ValueError(f"kv_scales exclude k_scale and v_scale, got {k_scale} and {v_scale}")
    arrays = {"kv_cache": kv_cache, "k": k, "v": v, "slot_mapping": slot_mapping, "kv_scales": kv_scales}
    return _call("write_kv", arrays, {"k_scale": k_scale, "v_scale": v_scale}, implementation, platform)


def copy_blocks(
    cache: Shaped[Array, "num_blocks ..."],
    sources: Int[Array, " n"],
    destinations: Int[Array, " n"],
    *,
    implementation: str = "auto",
    platform: str | None = None,
) -> Shaped[Array, "num_blocks ..."]:
    """The cache with block ``destinations[i]`` holding what block ``sources[i]`` holds in ``cache``.

    All sources are read before any destination is written: a block may be source and destination at once.

    Args:
        cache: of keys and values, or their scales: any array with a block an entry of its first axis.
        destinations: distinct, but for padding: entries whose source and destination are the scratch block 0.
        implementation, platform: as for ``write_kv``.

    Returns:
        The updated cache, in place when the caller donates ``cache``.
    """
    arrays = {"cache": cache, "sources": sources, "destinations": destinations}
    return _call("copy_blocks", arrays, {}, implementation, platform)


def gather_blocks(
    cache: Shaped[Array, "num_blocks ..."],
    block_ids: Int[Array, " n"],
    *,
    implementation: str = "auto",
    platform: str | None = None,
) -> Shaped[Array, "n ..."]:
    """A copy of the blocks, in the order of ``block_ids``. An id may appear more than once; 0 serves as padding.

    Args:
        cache: as for ``copy_blocks``.
        implementation, platform: as for ``write_kv``.
    """
    return _call("gather_blocks", {"cache": cache, "block_ids": block_ids}, {}, implementation, platform)


def scatter_blocks(
    cache: Shaped[Array, "num_blocks ..."],
    blocks: Shaped[Array, "n ..."],
    block_ids: Int[Array, " n"],
    *,
    implementation: str = "auto",
    platform: str | None = None,
) -> Shaped[Array, "num_blocks ..."]:
    """The cache with ``blocks[i]`` stored as block ``block_ids[i]``: undoes ``gather_blocks``.

    Args:
        cache: as for ``copy_blocks``.
        blocks: in the cache's dtype.
        block_ids: distinct, but for padding, which points into the scratch block 0, whose content does not matter.
        implementation, platform: as for ``write_kv``.

    Returns:
        The updated cache, in place when the caller donates ``cache``.

    Raises:
        ValueError: if ``blocks`` are not of the cache's shape and dtype.
    """
    if blocks.shape != (*block_ids.shape, *cache.shape[1:]) or blocks.dtype != cache.dtype:
        raise ValueError(
            f"blocks must be {len(block_ids)} of a cache of {cache.dtype} {cache.shape}, "
            f"got {blocks.dtype} {blocks.shape}"
        )
    arrays = {"cache": cache, "blocks": blocks, "block_ids": block_ids}
    return _call("scatter_blocks", arrays, {}, implementation, platform)


def _call(
    function: str, arrays: dict[str, Any], options: dict[str, Any], implementation: str, platform: str | None
) -> Any:
    choice = dispatch.choose(
        f"kv_cache_update.{function}",
        IMPLEMENTATIONS,
        arrays,
        options,
        implementation=implementation,
        platform=platform,
    )
    return choice.function(**{name: None if x is None else jnp.asarray(x) for name, x in arrays.items()}, **options)
