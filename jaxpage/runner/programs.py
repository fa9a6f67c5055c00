"""The compiled side of a step or of a stage of it, on one device or a mesh: the shapes of what it takes, its programs.

Holds no array: ``Worker`` does, and ``jaxpage.plan`` compiles the same programs for chips that are not there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxpage.batch import SamplingState, ScoredTokens, StepOutput
from jaxpage.config import EngineConfig
from jaxpage.layers.kv_cache import KVCache, kv_bytes_per_token, layer_cache_shape
from jaxpage.models.config import ModelConfig
from jaxpage.models.decoder import Params
from jaxpage.parallel.pipeline import Stage, stage_model
from jaxpage.parallel.placement import ON_ONE_DEVICE, Placement
from jaxpage.params import MAX_STOP_TOKEN_IDS
from jaxpage.runner.packing import Packing
from jaxpage.runner.step import StepOptions, first_stage, last_stage, middle_stage, step
from jaxpage.sampling.logits import PROMPT_FLAG


class StagePrograms:
    """Lowers a stage of a model's step for any number of tokens; the whole step if there is but one."""

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        placement: Placement = ON_ONE_DEVICE,
        stage: Stage | None = None,
    ) -> None:
        """``model`` is the whole one."""
        self.is_first = stage is None or stage.is_first
        self.is_last = stage is None or stage.is_last
        self.num_stages = 1 if stage is None else stage.num_stages
        self.model = model if stage is None else stage_model(model, stage)
        self.config, self.placement = config, placement
        layout = placement.layout
        # Where several processes compute a step, each can tell whether the others compute the same.
        self._has_fingerprint = (
            layout is not None and len({each.process_index for each in layout.mesh.devices.flat}) > 1
        )
        self.num_stop_ids = MAX_STOP_TOKEN_IDS + len(model.end_token_ids)

    @property
    def num_mask_words(self) -> int:
        """Words of a mask with a bit for every token."""
        return -(-self.model.vocab_size // 32)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes one token takes in the cache, all devices of the stage together."""
        model = self.model
        return kv_bytes_per_token(model.num_layers, model.num_kv_heads, model.head_dim, self.config.kv_cache_dtype)

    @property
    def device_bytes_per_block(self) -> int:
        """Bytes of a block on each device."""
        return device_bytes(self.cache_shapes(1))

    @property
    def state_bytes(self) -> int:
        """Bytes of the sampling state on each device."""
        return device_bytes(self.state_shapes()) if self.is_last else 0

    @property
    def num_in_flight(self) -> int:
        """Steps whose results can be on the device at once: one a stage that the host has not read, and the next."""
        return self.num_stages + 1

    def guessed_step_bytes(self, num_tokens: int) -> int:
        """What steps need on each device beside parameters and cache, before there is a compiled one to ask."""
        model, ways = self.model, self.placement.ways
        inner = max(model.intermediate_size // ways("ffn"), 1)
        temporaries = num_tokens * 4 * (model.hidden_size * 8 + inner * 4)
        return self.state_bytes + temporaries + self.in_flight_bytes(num_tokens)

    def step_bytes(self, num_tokens: int, compiled: jax.stages.Compiled) -> int | None:
        """The same of a compiled step; None if the compiler does not tell."""
        analysis = compiled.memory_analysis()
        if analysis is None:
            return None
        outputs = max(0, analysis.output_size_in_bytes - analysis.alias_size_in_bytes)
        return self.state_bytes + analysis.temp_size_in_bytes + self.in_flight_bytes(num_tokens, outputs)

    def in_flight_bytes(self, num_tokens: int, outputs: int | None = None) -> int:
        """What the steps in flight keep on each device: what the stage gave, and what it was given by the one before.

        Args:
            outputs: of one step, as the compiler lays them out; None: as their shapes say.
        """
        boundary = self.boundary_shape(num_tokens)
        if outputs is None:
            outputs = device_bytes(self.output_shapes(num_tokens) if self.is_last else boundary)
        inputs = 0 if self.is_first else device_bytes(boundary)
        return self.num_in_flight * (inputs + outputs)

    def packing(self, num_tokens: int) -> Packing:
        """The layout of the packed batch of a step with this many tokens."""
        return Packing(num_tokens, min(num_tokens, self.config.max_num_seqs), self.config.max_blocks_per_request)

    def cache_shapes(self, num_blocks: int) -> KVCache:
        """The KV cache with this many blocks, the scratch block included."""
        model, config = self.model, self.config
        shape = layer_cache_shape(
            num_blocks, model.num_kv_heads, config.block_size, model.head_dim, config.kv_cache_dtype
        )
        laid_out = jax.tree.map(lambda array, axes: self.placement.laid_out(array, axes, "kv_cache"), shape, shape.axes)
        return [laid_out] * model.num_layers

    def state_shapes(self) -> SamplingState:
        """The sampling state: a row for each running request and a spare one."""
        slots, vocab_size = self.config.max_num_seqs + 1, self.model.vocab_size

        def array(name: str, dtype: Any, shape: tuple[int, ...], *axes: str | None) -> Any:
            return self.placement.laid_out(jax.ShapeDtypeStruct(shape, dtype), axes, name)

        return SamplingState(
            last_token=array("last_token", jnp.int32, (slots,), "slots"),
            token_counts=array("token_counts", jnp.int32, (slots, vocab_size), "slots", "vocab"),
            logit_bias=array("logit_bias", jnp.float32, (slots, vocab_size), "slots", "vocab"),
            stop_ids=array("stop_ids", jnp.int32, (slots, self.num_stop_ids), "slots", None),
            token_mask=array("token_mask", jnp.int32, (slots, self.num_mask_words), "slots", None),
        )

    def lower(self, num_tokens: int, params: Params, num_blocks: int) -> jax.stages.Lowered:
        """The stage's part of a step for ``num_tokens`` tokens, ready to be compiled; ``params`` may be shapes.

        It takes and gives what the functions of ``runner.step`` say. Cache and state are donated.
        """
        packing, cache, config = self.packing(num_tokens), self.cache_shapes(num_blocks), self.config
        options = StepOptions(
            config=self.model,
            packing=packing,
            block_size=config.block_size,
            num_logprobs=max(1, config.num_logprobs),
            attention_implementation=config.attention_implementation,
            layout=self.placement.layout,
            has_fingerprint=self._has_fingerprint,
        )
        packed, x = self._replicated((packing.size,), jnp.int32), self.boundary_shape(num_tokens)
        state, output = self.state_shapes(), self.output_shapes(num_tokens)
        function: Callable[..., Any]
        takes: tuple[Any, ...]
        gives: tuple[Any, ...]
        if self.is_first and self.is_last:
            function, takes, gives = step, (state, packed), (state, output)
        elif self.is_first:
            function, takes, gives = first_stage, (self.first_stage_tokens, packed), (x,)
        elif self.is_last:
            function, takes, gives = last_stage, (state, x, packed), (state, output)
        else:
            function, takes, gives = middle_stage, (x, packed), (x,)
        # Donated arrays are updated in place only if they come out laid over the mesh as they went in.
        shardings = jax.tree.map(lambda shape: shape.sharding, (cache, *gives))
        placed = {"out_shardings": shardings} if self.placement.layout is not None else {}
        donated = (1, 2) if self.is_last else (1,)
        return jax.jit(partial(function, options=options), donate_argnums=donated, **placed).lower(
            params, cache, *takes
        )

    def boundary_shape(self, num_tokens: int) -> jax.ShapeDtypeStruct:
        """What one stage hands to the next."""
        return self._replicated((num_tokens, self.model.hidden_size), jnp.dtype(self.config.dtype))

    def output_shapes(self, num_tokens: int) -> StepOutput:
        """What the last stage gives, as a ``StepOutput`` of shapes."""
        packing, count = self.packing(num_tokens), max(1, self.config.num_logprobs)

        def array(dtype: Any, *shape: int) -> Any:
            return self._replicated(shape, dtype)

        def scores(rows: int) -> ScoredTokens:
            return ScoredTokens(
                logprob=array(jnp.float32, rows),
                rank=array(jnp.int32, rows),
                top_ids=array(jnp.int32, rows, count),
                top_logprobs=array(jnp.float32, rows, count),
            )

        return StepOutput(
            token_ids=array(jnp.int32, packing.num_rows),
            sampled=scores(packing.num_rows),
            prompt=scores(num_tokens),
            pooled=array(jnp.float32, packing.num_rows, self.model.hidden_size),
            fingerprint=self._fingerprint_shape(),
        )

    def _fingerprint_shape(self) -> Any:
        layout = self.placement.layout
        if layout is None or not self._has_fingerprint:
            return None
        each = NamedSharding(layout.mesh, PartitionSpec(layout.mesh.axis_names))
        return jax.ShapeDtypeStruct((layout.mesh.size,), jnp.int32, sharding=each)

    @property
    def first_stage_tokens(self) -> jax.ShapeDtypeStruct:
        """The tokens sampled last by slot, as the first stage takes them from the last one."""
        return self._replicated((self.config.max_num_seqs + 1,), jnp.int32)

    def _replicated(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return self.placement.laid_out(jax.ShapeDtypeStruct(shape, dtype), (None,) * len(shape))


def device_bytes(shapes: Any) -> int:
    """Bytes that arrays of these shapes take on each of their devices."""
    total = 0
    for shape in jax.tree.leaves(shapes):
        local = shape.shape if shape.sharding is None else shape.sharding.shard_shape(shape.shape)
        total += int(np.prod(local, dtype=np.int64)) * shape.dtype.itemsize
    return total


def fill_slot(state: SamplingState, slot, token_ids, num_prompt_tokens, bias, stop_ids) -> SamplingState:
    """``state`` with the slot's row filled; ``token_ids`` is padded with the vocabulary size."""
    is_prompt = jnp.arange(len(token_ids)) < num_prompt_tokens
    vocab_size = state.token_counts.shape[1]
    counts = jnp.zeros(vocab_size, jnp.int32).at[token_ids].add(jnp.where(is_prompt, 0, 1), mode="drop")
    in_prompt = jnp.zeros(vocab_size, bool).at[jnp.where(is_prompt, token_ids, vocab_size)].set(True, mode="drop")
    return state._replace(
        token_counts=state.token_counts.at[slot].set(counts + jnp.where(in_prompt, PROMPT_FLAG, 0)),
        logit_bias=state.logit_bias.at[slot].set(bias),
        stop_ids=state.stop_ids.at[slot].set(stop_ids),
    )


def set_masks(state: SamplingState, slots, words) -> SamplingState:
    """``state`` with the masks of some slots replaced."""
    return state._replace(token_mask=state.token_mask.at[slots].set(words))
