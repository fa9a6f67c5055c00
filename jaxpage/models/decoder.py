"""The only forward pass: a decoder driven by the specs of its layers.

Knows arrays and specs; families, requests and block ownership are elsewhere.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpage.batch import ModelInputs
from jaxpage.layers.kv_cache import KVCache, LayerCache
from jaxpage.layers.linear import linear
from jaxpage.layers.mlp import gated_mlp
from jaxpage.layers.moe import moe_mlp
from jaxpage.layers.norm import rms_norm
from jaxpage.layers.rope import Rotation, rotate, rotation
from jaxpage.models.config import LayerSpec, ModelConfig

Params = dict[str, Any]


def forward(
    params: Params, config: ModelConfig, kv_cache: KVCache, inputs: ModelInputs, attention_implementation: str = "auto"
) -> tuple[KVCache, Float[Array, "T D"]]:
    """Runs all layers over a ragged batch: writes its keys and values; the cache and the last hidden states."""
    with jax.named_scope("embedding"):
        x = params["embedding"][inputs.token_ids]
        if config.embedding_scale != 1.0:
            x = x * jnp.asarray(config.embedding_scale, x.dtype)
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
                layer_params, layer_cache, x, inputs, rotations[spec.rope], config, spec, attention_implementation
            )
        new_cache.append(layer_cache)
    return new_cache, rms_norm(x, params["final_norm"], config.norm_eps)


# Jitted so that layers of one spec are traced once; XLA inlines the calls.
@partial(jax.jit, static_argnums=(5, 6, 7))
def _layer(
    params: Params,
    kv_cache: LayerCache,
    x: Float[Array, "T D"],
    inputs: ModelInputs,
    rope: Rotation,
    config: ModelConfig,
    spec: LayerSpec,
    attention_implementation: str,
) -> tuple[LayerCache, Float[Array, "T D"]]:
    with jax.named_scope("attention"):
        normed = rms_norm(x, params["attention_norm"], config.norm_eps)
        qkv = linear(normed, params["qkv"], params.get("qkv_bias"))  # [T, K, G + 2, H]
        qk, v = qkv[:, :, :-1], qkv[:, :, -1]
        if spec.qk_norm:
            group = config.num_heads // config.num_kv_heads
            scales = jnp.stack([params["q_norm"]] * group + [params["k_norm"]])
            qk = rms_norm(qk, scales, config.norm_eps)
        qk = rotate(qk.reshape(len(x), -1, config.head_dim), rope).reshape(qk.shape)
        q, k = qk[:, :, :-1], qk[:, :, -1]
        kv_cache = kv_cache.write(k, v, inputs.slot_mapping)
        attended = kv_cache.attend(
            q.reshape(len(x), config.num_heads, config.head_dim),
            inputs.attention,
            scale=config.attention_scale,
            sliding_window=spec.sliding_window,
            implementation=attention_implementation,
        )
        update = linear(attended.reshape(len(x), -1), params["output"], params.get("output_bias"))
        x = x + (rms_norm(update, params["post_attention_norm"], config.norm_eps) if spec.post_norms else update)
    with jax.named_scope("mlp"):
        normed = rms_norm(x, params["mlp_norm"], config.norm_eps)
        if spec.experts is None:
            update = gated_mlp(
                normed,
                params["gate_up"],
                params["down"],
                spec.activation,
                params.get("gate_up_bias"),
                params.get("down_bias"),
            )
        else:
            update = moe_mlp(
                normed,
                params["router"],
                params["experts_gate_up"],
                params["experts_down"],
                spec.activation,
                num_experts_per_tok=spec.experts.num_experts_per_tok,
                norm_topk_prob=spec.experts.norm_topk_prob,
                num_tokens=inputs.attention.cu_seqlens_q[-1],
            )
        x = x + (rms_norm(update, params["post_mlp_norm"], config.norm_eps) if spec.post_norms else update)
    return kv_cache, x


def unembed(params: Params, config: ModelConfig, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
    """Logits in float32 of some hidden states."""
    weight = params["embedding"] if config.tied_embeddings else params["lm_head"]
    return linear(hidden, weight).astype(jnp.float32)
