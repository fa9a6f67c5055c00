"""Llama 2 and 3, SmolLM2 and others under LlamaForCausalLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.config import LayerSpec, ModelConfig
from jaxpage.models.hf import HFConfig
from jaxpage.models.weight_map import PRE_NORMS

ARCHITECTURES = ("LlamaForCausalLM",)
NORM_NAMES = PRE_NORMS


def config_from_hf(values: Mapping[str, Any], generation_config: Mapping[str, Any]) -> ModelConfig:
    """One kind of layer; biases on attention and MLP where the config says so."""
    config = HFConfig(values)
    layer = LayerSpec(
        rope=config.rope(),
        qkv_bias=config.flag("attention_bias"),
        output_bias=config.flag("attention_bias"),
        mlp_bias=config.flag("mlp_bias"),
        activation=config.activation("hidden_act"),
    )
    return config.model_config(generation_config, (layer,) * config.integer("num_hidden_layers"))
