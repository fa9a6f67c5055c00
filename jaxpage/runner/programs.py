"""The compiled side of a step: the shapes of what it takes, on one device or laid over a mesh, and its programs.

Holds no array: ``Runner`` does, and ``jaxpage.plan`` compiles the same programs for chips that are not there.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpage.batch import SamplingState
from jaxpage.config import EngineConfig
from jaxpage.layers.kv_cache import KVCache, kv_bytes_per_token, layer_cache_shape
from jaxpage.models.config import ModelConfig
from jaxpage.models.decoder import Params
from jaxpage.models.weight_map import ParamSpec
from jaxpage.parallel.sharding import sharded
from jaxpage.request import MAX_STOP_TOKEN_IDS
from jaxpage.runner.packing import Packing
from jaxpage.runner.step import step


class StepPrograms:
    """Lowers the step of a model for any number of tokens."""

    def __init__(self, model: ModelConfig, config: EngineConfig, mesh: Mesh | None = None) -> None:
        self.model, self.config, self.mesh = model, config, mesh
        self.num_stop_ids = MAX_STOP_TOKEN_IDS + len(model.end_token_ids)

    @property
    def num_mask_words(self) -> int:
        """Words of a mask with a bit for every token."""
        return -(-self.model.vocab_size // 32)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes one token takes in the cache, all devices together."""
        model = self.model
        return kv_bytes_per_token(model.num_layers, model.num_kv_heads, model.head_dim, self.config.kv_cache_dtype)

    def packing(self, num_tokens: int) -> Packing:
        """The layout of the packed batch of a step with this many tokens."""
        return Packing(num_tokens, min(num_tokens, self.config.max_num_seqs), self.config.max_blocks_per_request)

    def cache_shapes(self, num_blocks: int) -> KVCache:
        """The KV cache with this many blocks, the scratch block included."""
        model, config = self.model, self.config
        shape = layer_cache_shape(
            num_blocks, model.num_kv_heads, config.block_size, model.head_dim, config.kv_cache_dtype
        )
        return [jax.tree.map(self._laid_out, shape, shape.axes)] * model.num_layers

    def state_shapes(self) -> SamplingState:
        """The sampling state: a row for each running request and a spare one."""
        slots, vocab_size = self.config.max_num_seqs + 1, self.model.vocab_size

        def array(dtype: Any, shape: tuple[int, ...], *axes: str | None) -> Any:
            return self._laid_out(jax.ShapeDtypeStruct(shape, dtype), axes)

        return SamplingState(
            last_token=array(jnp.int32, (slots,), "slots"),
            token_counts=array(jnp.int32, (slots, vocab_size), "slots", "vocab"),
            logit_bias=array(jnp.float32, (slots, vocab_size), "slots", "vocab"),
            stop_ids=array(jnp.int32, (slots, self.num_stop_ids), "slots", None),
            token_mask=array(jnp.int32, (slots, self.num_mask_words), "slots", None),
        )

    def param_shapes(self, specs: Sequence[ParamSpec]) -> Params:
        """The parameters, all in the dtype of the activations."""
        params: Params = {"layers": [{} for _ in self.model.layers]}
        for spec in specs:
            *parents, name = spec.path
            node: Any = params
            for parent in parents:
                node = node[parent]
            node[name] = self._laid_out(jax.ShapeDtypeStruct(spec.shape, jnp.dtype(self.config.dtype)), spec.axes)
        return params

    def lower(self, num_tokens: int, params: Params, num_blocks: int) -> jax.stages.Lowered:
        """The step for ``num_tokens`` tokens, ready to be compiled; ``params`` may be shapes."""
        packing, cache, state = self.packing(num_tokens), self.cache_shapes(num_blocks), self.state_shapes()
        function = functools.partial(
            step,
            config=self.model,
            packing=packing,
            block_size=self.config.block_size,
            num_logprobs=max(1, self.config.num_logprobs),
            attention_implementation=self.config.attention_implementation,
        )
        packed: Any = jax.ShapeDtypeStruct((packing.size,), jnp.int32)
        placed: dict[str, Any] = {}
        if self.mesh is not None:
            packed = sharded(self.mesh, packed, (None,))
            # Donated arrays are updated in place only if they come out laid over the mesh as they went in.
            kept = jax.tree.map(lambda shape: shape.sharding, (cache, state))
            placed = {"out_shardings": (*kept, packed.sharding)}
        return jax.jit(function, donate_argnums=(1, 2), **placed).lower(params, cache, state, packed)

    def _laid_out(self, shape: Any, axes: Sequence[str | None]) -> Any:
        return shape if self.mesh is None else sharded(self.mesh, shape, axes)
