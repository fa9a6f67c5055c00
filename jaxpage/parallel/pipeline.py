"""Which layers and which parameters each stage of a pipeline has.

Plain data: knows neither devices nor arrays, nor what flows between stages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

from jaxpage.errors import ParameterError


@dataclasses.dataclass(frozen=True)
class Stage:
    """A run of consecutive layers. The first stage has the embedding too, the last the final norm and the output."""

    index: int
    num_stages: int
    first_layer: int
    num_layers: int

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    @property
    def layers(self) -> range:
        """Its layers, counted in the whole model."""
        return range(self.first_layer, self.first_layer + self.num_layers)


class _Model(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def layers(self) -> tuple[Any, ...]: ...


class _Spec(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def path(self) -> tuple[str | int, ...]: ...


M = TypeVar("M", bound=_Model)
"""A ``ModelConfig``: models are a higher layer than this one."""
S = TypeVar("S", bound=_Spec)
"""A ``ParamSpec``."""


def split_layers(num_layers: int, num_stages: int, pipeline_layers: Sequence[int] | None = None) -> list[Stage]:
    """The stages of a model.

    Args:
        pipeline_layers: layers of each stage; None: as equal as can be, where the first stages get those that are left
            over, since the last one has the output projection to compute beside its layers.

    Raises:
        ParameterError: a stage would have no layer, or the numbers do not add up to the model.
    """
    if num_stages > num_layers:
        raise ParameterError(
            "pipeline_parallel_size", f"{num_stages} stages need at least a layer each, the model has {num_layers}"
        )
    if pipeline_layers is None:
        size, rest = divmod(num_layers, num_stages)
        pipeline_layers = [size + (index < rest) for index in range(num_stages)]
    given = ",".join(map(str, pipeline_layers))
    if len(pipeline_layers) != num_stages:
        raise ParameterError(
            "pipeline_layers",
            f"{given} are {len(pipeline_layers)} stages, pipeline_parallel_size is {num_stages}",
        )
    if min(pipeline_layers) < 1 or sum(pipeline_layers) != num_layers:
        raise ParameterError(
            "pipeline_layers",
            f"must be at least 1 layer a stage and {num_layers} in all, as the model has; "
            f"got {given}, which is {sum(pipeline_layers)}",
        )
    starts = [sum(pipeline_layers[:index]) for index in range(num_stages)]
    return [
        Stage(index, num_stages, start, count)
        for index, (start, count) in enumerate(zip(starts, pipeline_layers, strict=True))
    ]


def stage_model(model: M, stage: Stage) -> M:
    """The model with the layers of this stage only."""
    layers = model.layers[stage.first_layer : stage.first_layer + stage.num_layers]
    return dataclasses.replace(model, layers=layers)


def stage_specs(specs: Iterable[S], stage: Stage, tied_embeddings: bool) -> list[S]:
    """The parameters of this stage; its layers are counted from 0 in the paths, as in ``stage_model``.

    A tied embedding is in the first stage and, as the output projection, in the last.
    """
    return [_renumbered(spec, stage) for spec in specs if _is_in(spec.path, stage, tied_embeddings)]


def _is_in(path: tuple[str | int, ...], stage: Stage, tied_embeddings: bool) -> bool:
    name = path[0]
    if name == "layers":
        return path[1] in stage.layers
    if name == "embedding":
        return stage.is_first or (stage.is_last and tied_embeddings)
    if name in ("final_norm", "lm_head"):
        return stage.is_last
    raise ValueError(f"no stage is known to need the parameter {'/'.join(map(str, path))}")


def _renumbered(spec: S, stage: Stage) -> S:
    name, *rest = spec.path
    if name != "layers":
        return spec
    index, *rest = rest
    assert isinstance(index, int), "a layer has a number"
    return dataclasses.replace(spec, path=(name, index - stage.first_layer, *rest))
