"""Which architecture names are served, and the family file of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxpage.errors import shown
from jaxpage.models import gemma3, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from jaxpage.models.config import ModelConfig, UnsupportedModelError
from jaxpage.models.weight_map import QWEN_EXPERTS, ParamSpec, param_specs

FAMILIES = (llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, gemma3)
ARCHITECTURES = {name: family for family in FAMILIES for name in family.ARCHITECTURES}


def build_config(
    hf_config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
) -> tuple[ModelConfig, list[ParamSpec]]:
    """The model that a Hugging Face config describes, and the parameters it has.

    Raises:
        UnsupportedModelError: naming the architecture, rope type, activation or size that cannot be served.
    """
    names = hf_config.get("architectures") or []
    name = next((name for name in names if name in ARCHITECTURES), None)
    if name is None:
        raise UnsupportedModelError(
            f"architecture {shown(names[0] if names else None)} (model_type {shown(hf_config.get('model_type'))}) "
            f"is not supported; supported: {', '.join(sorted(ARCHITECTURES))}"
        )
    family = ARCHITECTURES[name]
    config = family.config_from_hf(hf_config, generation_config or {})
    if len(config.layers) != hf_config.get("num_hidden_layers"):
        raise UnsupportedModelError(
            f"config.json: layer_types has {len(config.layers)} entries, "
            f"num_hidden_layers is {hf_config.get('num_hidden_layers')}"
        )
    if not config.model_type:
        # A config need not have it; people should still be told which model it is.
        config = dataclasses.replace(config, model_type=name)
    return config, list(param_specs(config, family.NORM_NAMES, getattr(family, "EXPERT_NAMES", QWEN_EXPERTS)))
