"""Mistral: Llama with a sliding window on every layer where the checkpoint sets one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.config import LayerSpec, ModelConfig
from jaxpage.models.hf import HFConfig
from jaxpage.models.weight_map import PRE_NORMS

ARCHITECTURES = ("MistralForCausalLM",)
NORM_NAMES = PRE_NORMS


def config_from_hf(values: Mapping[str, Any], generation_config: Mapping[str, Any]) -> ModelConfig:
    """One kind of layer, without biases."""
    config = HFConfig(values)
    layer = LayerSpec(rope=config.rope(), sliding_window=config.window(), activation=config.activation("hidden_act"))
    return config.model_config(generation_config, (layer,) * config.integer("num_hidden_layers"))
