"""Qwen2 and Qwen2.5: biases on q, k and v only; optionally a sliding window on the layers from max_window_layers on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxpage.models.config import LayerSpec, ModelConfig
from jaxpage.models.hf import HFConfig
from jaxpage.models.weight_map import PRE_NORMS

ARCHITECTURES = ("Qwen2ForCausalLM",)
NORM_NAMES = PRE_NORMS


def config_from_hf(values: Mapping[str, Any], generation_config: Mapping[str, Any]) -> ModelConfig:
    """Full attention unless ``use_sliding_window``."""
    config = HFConfig(values)
    full = LayerSpec(rope=config.rope(), qkv_bias=True, activation=config.activation("hidden_act"))
    return config.model_config(generation_config, window_layers(config, full))


def window_layers(config: HFConfig, full: LayerSpec) -> tuple[LayerSpec, ...]:
    """``full`` for every layer, with the sliding window where the Qwen family puts it."""
    num_layers = config.integer("num_hidden_layers")
    if not config.flag("use_sliding_window") or config.window() is None:
        return (full,) * num_layers
    sliding = dataclasses.replace(full, sliding_window=config.window())
    kinds = config.values.get("layer_types")
    if kinds is None:
        first = config.values.get("max_window_layers", 28)
        kinds = ["sliding_attention" if index >= first else "full_attention" for index in range(num_layers)]
    return tuple(sliding if kind == "sliding_attention" else full for kind in kinds)
