"""The only forward pass: a decoder driven by the specs of its layers.

Knows arrays and specs; families, requests and block ownership are elsewhere.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpage.batch import ModelInputs
from jaxpage.layers.kv_cache import KVCache, LayerCache
from jaxpage.layers.linear import linear, rows_of
from jaxpage.layers.mlp import gated_mlp
from jaxpage.layers.moe import moe_mlp
from jaxpage.layers.norm import rms_norm
from jaxpage.layers.rope import Rotation, rotate, rotation
from jaxpage.models.config import LayerSpec, ModelConfig
from jaxpage.parallel.sharding import Layout, constrain

Params = dict[str, Any]


BETWEEN_BLOCKS = ("tokens", "hidden")
"""Logical axes of hidden states between the blocks of a layer."""
IN_BLOCKS = (None, "hidden")
"""Logical axes of what a block reads: attention and products with weights take all tokens together."""


def forward(
    params: Params,
    config: ModelConfig,
    kv_cache: KVCache,
    inputs: ModelInputs,
    attention_implementation: str = "auto",
    layout: Layout | None = None,
) -> tuple[KVCache, Float[Array, "T D"]]:
    """Runs all layers over a ragged batch: writes its keys and values; the cache and the last hidden states.

    A stage of a pipeline runs the parts of this that it has.

    Args:
        layout: how parameters and cache are split over devices; None for one device.
    """
    x = embed(params, config, inputs.token_ids, layout)
    kv_cache, x = apply_layers(params, config, kv_cache, x, inputs, attention_implementation, layout)
    return kv_cache, final_norm(params, config, x, layout)


def embed(
    params: Params, config: ModelConfig, token_ids: Int[Array, " T"], layout: Layout | None = None
) -> Float[Array, "T D"]:
    """The hidden states that the first layer reads."""
    with jax.named_scope("embedding"):
        x = rows_of(params["embedding"], token_ids)
        if config.embedding_scale != 1.0:
            x = x * jnp.asarray(config.embedding_scale, x.dtype)
        return constrain(layout, x, BETWEEN_BLOCKS)


def apply_layers(
    params: Params,
    config: ModelConfig,
    kv_cache: KVCache,
    x: Float[Array, "T D"],
    inputs: ModelInputs,
    attention_implementation: str = "auto",
    layout: Layout | None = None,
) -> tuple[KVCache, Float[Array, "T D"]]:
    """Runs ``config.layers``, whose parameters are ``params["layers"]``: all of a model's, or those of a stage."""
    rotations = {
        spec: rotation(spec.inverse_frequencies(config.head_dim), inputs.positions)
        for spec in {layer.rope for layer in config.layers}
    }
    new_cache = []
    for index, (spec, layer_params, layer_cache) in enumerate(
        zip(config.layers, params["layers"], kv_cache, strict=True)
    ):
        with jax.named_scope(f"layer_{index}"):
            layer_cache, x = _layer(
                layer_params, layer_cache, x, inputs, rotations[spec.rope], config, spec, attention_implementation,
                layout,
            )  # fmt: skip
        new_cache.append(layer_cache)
    return new_cache, x


def final_norm(
    params: Params, config: ModelConfig, x: Float[Array, "T D"], layout: Layout | None = None
) -> Float[Array, "T D"]:
    """What ``unembed`` reads, from the output of the last layer."""
    # Whoever comes next picks tokens.
    return constrain(layout, rms_norm(x, params["final_norm"], config.norm_eps), IN_BLOCKS)


# Jitted so that layers of one spec are traced once; XLA inlines the calls.
@partial(jax.jit, static_argnums=(5, 6, 7, 8))
def _layer(
    params: Params,
    kv_cache: LayerCache,
    x: Float[Array, "T D"],
    inputs: ModelInputs,
    rope: Rotation,
    config: ModelConfig,
    spec: LayerSpec,
    attention_implementation: str,
    layout: Layout | None,
) -> tuple[LayerCache, Float[Array, "T D"]]:
    def before(block: str, axis: str | None) -> Float[Array, "T D"]:
        """What a block reads, whose first weight is split by ``axis``: all tokens, unless it passes them on itself."""
        passes_on = layout is not None and layout.passes_tokens(axis, len(x))
        normed = rms_norm(x, params[f"{block}_norm"], config.norm_eps)
        return constrain(layout, normed, BETWEEN_BLOCKS if passes_on else IN_BLOCKS)

    def after(block: str, update: Float[Array, "T D"]) -> Float[Array, "T D"]:
        update = constrain(layout, update, BETWEEN_BLOCKS)
        return x + (rms_norm(update, params[f"post_{block}_norm"], config.norm_eps) if spec.post_norms else update)

    with jax.named_scope("attention"):
        normed = before("attention", "kv_heads")
        kv_cache, update = _attention(
            params, kv_cache, normed, inputs, rope, config, spec, attention_implementation, layout
        )
        x = after("attention", update)
    with jax.named_scope("mlp"):
        normed = before("mlp", "ffn" if spec.experts is None else None)
        x = after("mlp", _mlp(params, normed, inputs, spec, layout))
    return kv_cache, x


def _attention(
    params: Params,
    kv_cache: LayerCache,
    normed: Float[Array, "T D"],
    inputs: ModelInputs,
    rope: Rotation,
    config: ModelConfig,
    spec: LayerSpec,
    implementation: str,
    layout: Layout | None,
) -> tuple[LayerCache, Float[Array, "T D"]]:
    between = partial(linear, num_tokens=_num_real(inputs), layout=layout, is_between_blocks=True)
    # [T, K, G + 2, H]
    qkv = between(normed, params["qkv"], params.get("qkv_bias"), axes=("kv_heads", None, None, "hidden"))
    qk, v = qkv[:, :, :-1], qkv[:, :, -1]
    if spec.qk_norm:
        group = config.num_heads // config.num_kv_heads
        scales = jnp.stack([params["q_norm"]] * group + [params["k_norm"]])
        qk = rms_norm(qk, scales, config.norm_eps)
    qk = rotate(qk.reshape(len(qk), -1, config.head_dim), rope).reshape(qk.shape)
    q, k = qk[:, :, :-1], qk[:, :, -1]
    kv_cache = kv_cache.write(k, v, inputs.slot_mapping, layout)
    attended = kv_cache.attend(
        q.reshape(len(q), config.num_heads, config.head_dim),
        inputs.attention,
        layout,
        scale=config.attention_scale,
        sliding_window=spec.sliding_window,
        implementation=implementation,
    )
    heads = attended.reshape(len(attended), -1)
    return kv_cache, between(heads, params["output"], params.get("output_bias"), axes=("hidden", "heads"))


def _num_real(inputs: ModelInputs) -> Int[Array, ""]:
    """Tokens of the batch; the rest is padding."""
    return inputs.attention.cu_seqlens_q[-1]


def _mlp(
    params: Params, normed: Float[Array, "T D"], inputs: ModelInputs, spec: LayerSpec, layout: Layout | None
) -> Float[Array, "T D"]:
    if spec.experts is None:
        return gated_mlp(
            normed,
            params["gate_up"],
            params["down"],
            spec.activation,
            params.get("gate_up_bias"),
            params.get("down_bias"),
            _num_real(inputs),
            layout,
        )
    return moe_mlp(
        normed,
        params["router"],
        params["experts_gate_up"],
        params["experts_down"],
        spec.activation,
        num_experts_per_tok=spec.experts.num_experts_per_tok,
        norm_topk_prob=spec.experts.norm_topk_prob,
        num_tokens=_num_real(inputs),
        layout=layout,
    )


def unembed(
    params: Params,
    config: ModelConfig,
    hidden: Float[Array, "R D"],
    layout: Layout | None = None,
    num_rows: Int[Array, ""] | None = None,
) -> Float[Array, "R V"]:
    """Logits in float32 of some hidden states; those from ``num_rows`` on, if given, mean nothing."""
    weight = params["embedding"] if config.tied_embeddings else params["lm_head"]
    logits = linear(hidden, weight, num_tokens=num_rows, axes=("vocab", "hidden"), layout=layout)
    return constrain(layout, logits, (None, "vocab")).astype(jnp.float32)
