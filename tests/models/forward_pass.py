"""Runs the decoder's forward pass alone: one request, any cut of its tokens into steps."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxpage.batch import ModelInputs
from jaxpage.engine.build import configure_jax
from jaxpage.layers.kv_cache import layer_cache_shape
from jaxpage.models.decoder import forward, unembed
from jaxpage.models.registry import build_config
from jaxpage.parallel.placement import ON_ONE_DEVICE
from jaxpage.runner.buckets import bucket_for
from jaxpage.weights import open_checkpoint
from jaxpage.weights.loader import load_params
from pallas_kernels import AttentionMetadata


class ForwardPass:
    """A model in float32 with the blocks of one request, which lie in the cache in descending order."""

    def __init__(
        self,
        directory: Path,
        *,
        block_size: int = 4,
        num_blocks: int = 33,
        kv_cache_dtype: str = "float32",
        quantization: str | None = None,
    ) -> None:
        configure_jax()
        checkpoint = open_checkpoint(directory)
        self.config, specs = build_config(checkpoint.config, checkpoint.generation_config)
        placement = ON_ONE_DEVICE
        self.params = load_params(checkpoint, self.config, specs, "float32", placement, quantization=quantization)
        self.block_size, self.num_blocks, self.kv_cache_dtype = block_size, num_blocks, kv_cache_dtype

    def logits(self, token_ids: list[int], step_sizes: list[int], buckets: tuple[int, ...] = (1, 96)) -> np.ndarray:
        """Logits of all positions, computed ``step_sizes[i]`` tokens at a time; a step is padded to a bucket."""
        assert sum(step_sizes) == len(token_ids)
        config = self.config
        shape = layer_cache_shape(
            self.num_blocks, config.num_kv_heads, self.block_size, config.head_dim, self.kv_cache_dtype
        )
        # What nobody has written must not be read.
        empty = jax.tree.map(lambda x: jnp.full(x.shape, 127 if x.dtype == jnp.int8 else jnp.nan, x.dtype), shape)
        cache = [empty for _ in config.layers]
        block_table = np.arange(self.num_blocks - 1, 0, -1, dtype=np.int32)
        rows, start = [], 0
        for size in step_sizes:
            padded = bucket_for(list(buckets), size)
            ids, positions, slots = (np.zeros(padded, np.int32) for _ in range(3))
            ids[:size] = token_ids[start : start + size]
            positions[:size] = np.arange(start, start + size)
            used = positions[:size]
            slots[:size] = block_table[used // self.block_size] * self.block_size + used % self.block_size
            metadata = AttentionMetadata(
                block_table[None], np.array([start + size], np.int32), np.array([0, size], np.int32)
            )
            inputs = jax.tree.map(jnp.asarray, ModelInputs(ids, positions, slots, metadata))
            # Not under one jit: layers are jitted one by one, and equal ones are compiled once.
            cache, hidden = forward(self.params, config, cache, inputs)
            rows.append(np.asarray(unembed(self.params, config, hidden))[:size])
            start += size
        return np.concatenate(rows)
