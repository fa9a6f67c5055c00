"""Mixtral: Mistral with a mixture of experts in every layer, of which the router takes the most likely ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.config import LayerSpec, ModelConfig
from jaxpage.models.hf import HFConfig
from jaxpage.models.weight_map import MIXTRAL_EXPERTS, PRE_NORMS

ARCHITECTURES = ("MixtralForCausalLM",)
NORM_NAMES = PRE_NORMS
EXPERT_NAMES = MIXTRAL_EXPERTS


def config_from_hf(values: Mapping[str, Any], generation_config: Mapping[str, Any]) -> ModelConfig:
    """One kind of layer; the weights of a token's experts sum to 1."""
    config = HFConfig(values)
    layer = LayerSpec(
        rope=config.rope(default_theta=1e6),
        sliding_window=config.window(),
        activation=config.activation("hidden_act"),
        experts=config.experts(config.integer("num_local_experts"), norm_topk_prob=True),
    )
    return config.model_config(generation_config, (layer,) * config.integer("num_hidden_layers"))
