"""Qwen3 (dense): RMS norm of query and key heads, no biases unless attention_bias, explicit head_dim."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.config import LayerSpec, ModelConfig
from jaxpage.models.hf import HFConfig
from jaxpage.models.qwen2 import window_layers
from jaxpage.models.weight_map import PRE_NORMS

ARCHITECTURES = ("Qwen3ForCausalLM",)
NORM_NAMES = PRE_NORMS


def config_from_hf(values: Mapping[str, Any], generation_config: Mapping[str, Any]) -> ModelConfig:
    """Windows as in Qwen2."""
    config = HFConfig(values)
    full = LayerSpec(
        rope=config.rope(),
        qk_norm=True,
        qkv_bias=config.flag("attention_bias"),
        output_bias=config.flag("attention_bias"),
        activation=config.activation("hidden_act"),
    )
    return config.model_config(generation_config, window_layers(config, full), head_dim=128)
