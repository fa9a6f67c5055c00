"""Stages have every layer once and every parameter where it is used, and say with numbers what cannot be split."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from jaxpage.errors import ParameterError
from jaxpage.models.config import LayerSpec, ModelConfig, RopeSpec
from jaxpage.models.weight_map import PRE_NORMS, ParamSpec, param_specs
from jaxpage.parallel.pipeline import Stage, split_layers, stage_model, stage_specs


def model_of(num_layers: int, *, tied: bool) -> ModelConfig:
    """Each layer can be told from the others."""
    layers = tuple(LayerSpec(RopeSpec(), sliding_window=index + 1) for index in range(num_layers))
    return ModelConfig("llama", 32, 8, 16, 2, 1, 4, layers, 1e-5, 0.5, 64, tied_embeddings=tied)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "given", "expected"),
    [
        (7, 1, None, [7]),
        (8, 4, None, [2, 2, 2, 2]),
        (30, 4, None, [8, 8, 7, 7]),
        (3, 3, None, [1, 1, 1]),
        (32, 3, [10, 12, 10], [10, 12, 10]),
    ],
)
def test_layers_are_split(num_layers: int, num_stages: int, given: list[int] | None, expected: list[int]) -> None:
    stages = split_layers(num_layers, num_stages, given)
    assert [stage.num_layers for stage in stages] == expected
    assert [layer for stage in stages for layer in stage.layers] == list(range(num_layers))
    assert [(stage.index, stage.num_stages) for stage in stages] == [(index, num_stages) for index in range(num_stages)]
    assert [stage.is_first for stage in stages] == [True] + [False] * (num_stages - 1)
    assert [stage.is_last for stage in stages] == [False] * (num_stages - 1) + [True]


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (lambda: split_layers(4, 5), r"^pipeline_parallel_size: 5 stages need at least a layer each, .* has 4$"),
        (lambda: split_layers(4, 2, [2, 1]), r"^pipeline_layers: .* and 4 in all, .*; got 2,1, which is 3$"),
        (lambda: split_layers(4, 2, [4, 0]), r"^pipeline_layers: must be at least 1 layer a stage .* got 4,0, "),
        (lambda: split_layers(4, 3, [2, 2]), r"^pipeline_layers: 2,2 are 2 stages, pipeline_parallel_size is 3$"),
    ],
)
def test_what_cannot_be_split_is_said_with_numbers(split: Callable[[], list[Stage]], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        split()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_stages_have_the_layers_and_parameters_of_the_model(num_stages: int, tied: bool) -> None:
    model = model_of(5, tied=tied)
    specs = list(param_specs(model, PRE_NORMS))
    stages = split_layers(5, num_stages)
    models = [stage_model(model, stage) for stage in stages]
    assert sum((part.layers for part in models), ()) == model.layers
    sources: list[str] = []
    for stage, part in zip(stages, models, strict=True):
        own = stage_specs(specs, stage, tied)
        in_layers = [spec for spec in own if spec.path[0] == "layers"]
        assert {spec.path[1] for spec in in_layers} == set(range(part.num_layers))
        for spec in in_layers:
            number = int(spec.path[1]) + stage.first_layer
            assert all(name.startswith(f"model.layers.{number}.") for name in spec.sources)
        outside = {spec.path[0] for spec in own} - {"layers"}
        expected = {"embedding"} if stage.is_first else set()
        if stage.is_last:
            expected |= {"final_norm", "embedding" if tied else "lm_head"}
        assert outside == expected
        sources += [name for spec in own for name in spec.sources]
    whole = [name for spec in specs for name in spec.sources]
    twice = ["model.embed_tokens.weight"] if tied and num_stages > 1 else []
    assert sorted(sources) == sorted(whole + twice)


def test_one_stage_is_the_model() -> None:
    model = model_of(3, tied=True)
    [stage] = split_layers(3, 1)
    specs = list(param_specs(model, PRE_NORMS))
    assert stage_model(model, stage) == model
    assert [spec.path for spec in stage_specs(specs, stage, True)] == [spec.path for spec in specs]


def test_a_parameter_that_has_no_stage_is_an_error() -> None:
    spec = ParamSpec(("position", 3), (1,), (None,), {"p": (1,)}, lambda tensor: np.asarray(tensor))
    with pytest.raises(ValueError, match="no stage is known to need the parameter position/3"):
        stage_specs([spec], Stage(0, 2, 0, 1), False)
