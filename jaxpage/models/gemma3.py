"""Gemma 3 text: sliding and global layers with a rope base each, qk-norm, norms before and after each block.

Norm weights are stored as w of (1 + w); embeddings are scaled by sqrt(hidden_size) and tied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpage.errors import shown
from jaxpage.models.config import LayerSpec, ModelConfig, UnsupportedModelError
from jaxpage.models.hf import HFConfig
from jaxpage.models.weight_map import SANDWICH_NORMS

ARCHITECTURES = ("Gemma3ForCausalLM",)
NORM_NAMES = SANDWICH_NORMS


def config_from_hf(values: Mapping[str, Any], generation_config: Mapping[str, Any]) -> ModelConfig:
    """Which layers are global: ``layer_types``, else every ``sliding_window_pattern``-th (6)."""
    config = HFConfig(values)
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if values.get(key):
            raise UnsupportedModelError(f"config.json: {key} {shown(values[key])} is not supported for Gemma 3")
    parameters = values.get("rope_parameters") or {}
    if "full_attention" in parameters:
        global_rope, local_rope = config.rope(part="full_attention"), config.rope(part="sliding_attention")
    else:
        global_rope = config.rope(default_theta=1e6)
        # Scaling, where there is any, is for the global layers only.
        local_rope = HFConfig({"rope_theta": values.get("rope_local_base_freq") or 10000.0}).rope()
    common: dict[str, Any] = {
        "qk_norm": True,
        "qkv_bias": config.flag("attention_bias"),
        "output_bias": config.flag("attention_bias"),
        "activation": config.activation("hidden_activation", "hidden_act"),
        "post_norms": True,
    }
    sliding = LayerSpec(rope=local_rope, sliding_window=config.integer("sliding_window", 4096), **common)
    full = LayerSpec(rope=global_rope, **common)
    pattern = values.get("sliding_window_pattern") or values.get("_sliding_window_pattern") or 6
    num_layers = config.integer("num_hidden_layers")
    kinds = values.get("layer_types") or [
        "full_attention" if (index + 1) % pattern == 0 else "sliding_attention" for index in range(num_layers)
    ]
    return config.model_config(
        generation_config,
        tuple(sliding if kind == "sliding_attention" else full for kind in kinds),
        head_dim=256,
        attention_scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        # Hugging Face multiplies by the factor rounded to the weights' type; float32 here.
        embedding_scale=float(np.float32(config.integer("hidden_size") ** 0.5)),
        norm_offset=1.0,
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )
