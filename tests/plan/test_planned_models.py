"""The model that is planned for, by each of the names it may have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxpage.errors import ParameterError
from jaxpage.models.presets import PRESETS
from jaxpage.plan.models import find_values, read_model
from jaxpage.plan.scenario import make_scenario
from jaxpage.plan.slices import find_slice

BILLIONS = {
    "llama-3-8b": 8.03, "llama-3-70b": 70.6, "llama-3.1-8b": 8.03, "llama-3.2-1b": 1.24, "llama-3.2-3b": 3.21,
    "llama-3.3-70b": 70.6, "qwen2.5-0.5b": 0.494, "qwen2.5-1.5b": 1.54, "qwen2.5-3b": 3.09, "qwen2.5-7b": 7.62,
    "qwen2.5-14b": 14.8, "qwen2.5-32b": 32.8, "qwen2.5-72b": 72.7, "qwen3-0.6b": 0.596, "qwen3-1.7b": 1.72,
    "qwen3-4b": 4.02, "qwen3-8b": 8.19, "qwen3-14b": 14.8, "qwen3-32b": 32.8, "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235.1, "gemma-3-270m": 0.268, "gemma-3-1b": 1.0, "gemma-3-4b": 3.88, "gemma-3-12b": 11.77,
    "gemma-3-27b": 27.0, "mixtral-8x7b": 46.7, "smollm2-135m": 0.135,
}  # fmt: skip
"""Parameters by the models' cards; of Gemma 3 without what sees images."""


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_models_that_are_served(name: str) -> None:
    scenario = make_scenario(name, find_values(name.upper()), find_slice("v5e-1"), {"max_model_len": 1024})
    assert scenario.num_params == pytest.approx(BILLIONS[name] * 1e9, rel=0.01)
    assert scenario.model.num_layers == PRESETS[name]["num_hidden_layers"]


def test_a_model_is_a_config_file_or_its_directory(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PRESETS["qwen3-8b"]))
    assert find_values(str(tmp_path)) == find_values(str(path)) == PRESETS["qwen3-8b"]


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", r"model: .*config.json' is not JSON"), ("[]", r"model: .*config.json' must hold an object")],
)
def test_a_broken_config_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ParameterError, match=message):
        find_values(str(path))


def test_what_cannot_be_served_is_said() -> None:
    with pytest.raises(ParameterError, match="model: architecture 'Other'"):
        read_model({"architectures": ["Other"]})
    with pytest.raises(
        ParameterError, match=r"model: must be a config.json, .* smollm2-135m-instruct, .*; got 'nothing'"
    ):
        find_values("nothing")
