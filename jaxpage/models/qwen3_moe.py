"""Qwen3 MoE: Qwen3's attention, with experts in some or all layers and a dense MLP in the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxpage.errors import shown
from jaxpage.models.config import LayerSpec, ModelConfig, UnsupportedModelError
from jaxpage.models.hf import HFConfig
from jaxpage.models.weight_map import PRE_NORMS, QWEN_EXPERTS

ARCHITECTURES = ("Qwen3MoeForCausalLM",)
NORM_NAMES = PRE_NORMS
EXPERT_NAMES = QWEN_EXPERTS


def config_from_hf(values: Mapping[str, Any], generation_config: Mapping[str, Any]) -> ModelConfig:
    """Experts in every ``decoder_sparse_step``-th layer, except in ``mlp_only_layers``; a window is for all layers."""
    config = HFConfig(values)
    dense = LayerSpec(
        rope=config.rope(),
        sliding_window=config.window() if config.flag("use_sliding_window") else None,
        qk_norm=True,
        qkv_bias=config.flag("attention_bias"),
        output_bias=config.flag("attention_bias"),
        activation=config.activation("hidden_act"),
    )
    # Newer files have the number under the name that other families use.
    key = "num_experts" if values.get("num_experts") is not None else "num_local_experts"
    experts = config.experts(config.integer(key), config.flag("norm_topk_prob"), "moe_intermediate_size")
    sparse = dataclasses.replace(dense, experts=experts)
    period = config.integer("decoder_sparse_step", 1)
    dense_layers = values.get("mlp_only_layers") or []
    if not isinstance(dense_layers, list):
        raise UnsupportedModelError(f"config.json: mlp_only_layers must be a list, got {shown(dense_layers)}")
    layers = tuple(
        dense if index in dense_layers or (index + 1) % period else sparse
        for index in range(config.integer("num_hidden_layers"))
    )
    return config.model_config(generation_config, layers)
