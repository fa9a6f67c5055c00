"""The paged KV cache of a layer as the model sees it: its arrays, its size, how it is written and attended to.

Must not know who owns a block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from jaxpage.parallel.sharding import Layout, on_local_parts
from pallas_kernels import AttentionMetadata, ragged_paged_attention, write_kv

QUANTIZED_DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")
SCALE_DTYPE = jnp.float32


class LayerCache(NamedTuple):
    """Keys and values of one layer.

    Attributes:
        kv: the row of a slot holds a key and beside it the value.
        scales: of each slot and KV head, for the key (0) and the value (1); None unless the cache is quantised.
    """

    kv: Num[Array, "num_blocks K block_size 2*H"]
    scales: Float[Array, "num_blocks 2 K block_size"] | None = None

    def write(
        self,
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        slot_mapping: Int[Array, " T"],
        layout: Layout | None = None,
    ) -> LayerCache:
        """The cache with keys and values at their slots, quantised by token and KV head if the cache is."""

        def write_local(cache: LayerCache, k: Array, v: Array, slot_mapping: Array) -> LayerCache:
            if cache.scales is None:
                return LayerCache(write_kv(cache.kv, k, v, slot_mapping))
            return LayerCache(*write_kv(cache.kv, k, v, slot_mapping, kv_scales=cache.scales))

        per_head = (None, "kv_heads", None)
        in_axes = (self.axes, per_head, per_head, (None,))
        return on_local_parts(layout, write_local, in_axes, self.axes, self, k, v, slot_mapping)

    def attend(
        self, q: Float[Array, "T N H"], metadata: AttentionMetadata, layout: Layout | None = None, **options: Any
    ) -> Float[Array, "T N H"]:
        """See ``pallas_kernels.ragged_paged_attention``, whose ``options`` are passed on."""

        def attend_local(q: Array, cache: LayerCache, metadata: AttentionMetadata) -> Array:
            return ragged_paged_attention(q, cache.kv, metadata, kv_scales=cache.scales, **options)

        per_head = (None, "heads", None)
        in_axes = (per_head, self.axes, jax.tree.map(lambda array: (None,) * array.ndim, metadata))
        return on_local_parts(layout, attend_local, in_axes, per_head, q, self, metadata)

    @property
    def axes(self) -> LayerCache:
        """The logical axes of its arrays."""
        scales: Any = None if self.scales is None else ("blocks", None, "kv_heads", None)
        return LayerCache(("blocks", "kv_heads", None, None), scales)  # pyright: ignore[reportArgumentType]


KVCache = list[LayerCache]
"""One a layer."""


def layer_cache_shape(num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: str) -> LayerCache:
    """A layer's cache as ``jax.ShapeDtypeStruct``; ``dtype`` is the name of a numpy or ml_dtypes type."""
    kv: Any = jax.ShapeDtypeStruct((num_blocks, num_kv_heads, block_size, 2 * head_dim), jnp.dtype(dtype))
    scales: Any = jax.ShapeDtypeStruct((num_blocks, 2, num_kv_heads, block_size), SCALE_DTYPE)
    return LayerCache(kv, scales if dtype in QUANTIZED_DTYPES else None)


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: str) -> int:
    """Bytes of keys, values and their scales that one token takes in all layers."""
    scale_bytes = jnp.dtype(SCALE_DTYPE).itemsize if dtype in QUANTIZED_DTYPES else 0
    return 2 * num_layers * num_kv_heads * (head_dim * jnp.dtype(dtype).itemsize + scale_bytes)
