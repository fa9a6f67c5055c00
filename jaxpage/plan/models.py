"""The model that is planned for, by any of the names that people have for it. Reads a config, never weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpage.errors import ParameterError, shown
from jaxpage.models.config import ModelConfig, UnsupportedModelError
from jaxpage.models.presets import PRESETS
from jaxpage.models.registry import build_config
from jaxpage.models.weight_map import ParamSpec
from jaxpage.weights.builtin import BUILTIN_MODELS
from jaxpage.weights.source import WeightsError, open_checkpoint, resolve_model


def find_values(name: str) -> dict[str, Any]:
    """The Hugging Face config of a preset, a built-in model, a directory, a config.json or a GGUF file.

    Raises:
        ParameterError: if there is none.
    """
    preset = PRESETS.get(name.lower())
    if preset is not None:
        return dict(preset)
    path = Path(name).expanduser()
    path = path / "config.json" if (path / "config.json").is_file() else path
    if path.suffix == ".json" and path.is_file():
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ParameterError("model", f"{shown(str(path))} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ParameterError("model", f"{shown(str(path))} must hold an object")
        return values
    if name not in BUILTIN_MODELS and not path.exists():
        known = ", ".join(dict.fromkeys([*BUILTIN_MODELS, *PRESETS]))
        raise ParameterError(
            "model", f"must be a config.json, its directory, a .gguf file or one of {known}; got {shown(name)}"
        )
    try:
        return dict(open_checkpoint(resolve_model(name), needs_weights=False).config)
    except (WeightsError, OSError) as error:
        raise ParameterError("model", str(error)) from error


def read_model(values: Mapping[str, Any]) -> tuple[ModelConfig, list[ParamSpec]]:
    """The model of a config, and its parameters.

    Raises:
        ParameterError: if it cannot be served.
    """
    try:
        return build_config(values)
    except UnsupportedModelError as error:
        raise ParameterError("model", str(error)) from error
