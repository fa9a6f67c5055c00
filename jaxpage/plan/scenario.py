"""One way to serve a model: its options, the chips, and what each stage of it holds. No weights and no devices.

It must not know what fits or how long anything takes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxpage.config import EngineArgs, EngineConfig, resolve
from jaxpage.engine.build import place
from jaxpage.errors import ParameterError
from jaxpage.models.config import ModelConfig
from jaxpage.models.weight_map import ParamSpec
from jaxpage.parallel.pipeline import Stage, stage_specs
from jaxpage.parallel.sharding import naming_what_was_given, without_effect
from jaxpage.plan.models import read_model
from jaxpage.plan.slices import Slice
from jaxpage.runner.programs import StagePrograms, device_bytes
from jaxpage.weights.loader import param_shapes


@dataclasses.dataclass(frozen=True)
class StagePart:
    """A stage of the pipeline, or the whole model, on its devices.

    Attributes:
        specs: its parameters.
        platform: "tpu", "gpu" or "cpu".
    """

    stage: Stage
    programs: StagePrograms
    specs: Sequence[ParamSpec]
    platform: str

    @functools.cached_property
    def params(self) -> Any:
        """The tree of its parameters, quantised ones as they are stored, as shapes."""
        programs = self.programs
        config = programs.config
        return param_shapes(programs.model, self.specs, config.dtype, programs.placement, config.quantization)

    def param(self, spec: ParamSpec) -> Any:
        """One of them."""
        return functools.reduce(lambda node, name: node[name], spec.path, self.params)

    @functools.cached_property
    def weight_bytes(self) -> int:
        """Of its parameters on each device."""
        return device_bytes(self.params)

    def local_size(self, spec: ParamSpec) -> int:
        """Elements of a parameter on each device."""
        sizes = zip(spec.shape, spec.axes, strict=True)
        return math.prod(size // self.programs.placement.ways(axis) for size, axis in sizes)

    @property
    def itemsize(self) -> int:
        """Bytes of a number in hidden states."""
        return np.dtype(self.programs.config.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A model, options and chips that fit each other.

    Attributes:
        name: what the user calls the model.
        values: its Hugging Face config.
        num_params: of the model itself.
        model: as its devices see it.
        kv_repeats: how often it has each KV head of the model itself, for there are fewer than devices.
        config: of one engine; ``args.data_parallel_size`` of them share the requests.
    """

    name: str
    values: Mapping[str, Any]
    where: Slice
    args: EngineArgs
    config: EngineConfig
    num_params: int
    model: ModelConfig
    kv_repeats: int
    parts: tuple[StagePart, ...]

    @property
    def num_replicas(self) -> int:
        return self.args.data_parallel_size

    @property
    def num_devices(self) -> int:
        """Devices that all engines use together."""
        return self.args.num_devices * self.num_replicas

    @property
    def splits_attention(self) -> bool:
        """Whether each device has only some of the heads."""
        return self.args.tensor_parallel_size == 1 or self.parts[0].programs.placement.ways("heads") > 1

    @property
    def sharding_name(self) -> str:
        """The sharding in words, such as "TP 8" or "two_dimensional 8 x DP 2"."""
        args = self.args
        kind = args.sharding or ("EP" if args.enable_expert_parallel else "TP")
        kind += "" if args.sharding or self.splits_attention else " (attention whole)"
        words = [f"{kind} {args.tensor_parallel_size}"]
        words += [f"PP {args.pipeline_parallel_size}"] if args.pipeline_parallel_size > 1 else []
        words += [f"DP {args.data_parallel_size}"] if args.data_parallel_size > 1 else []
        return " x ".join(words)

    @property
    def type_name(self) -> str:
        """The types of weights and cache in words."""
        config = self.config
        weights = f"{config.quantization} weights, {config.dtype}" if config.quantization else config.dtype
        return weights if config.kv_cache_dtype == config.dtype else f"{weights}, KV cache {config.kv_cache_dtype}"

    @property
    def notes(self) -> list[str]:
        """What of the sharding does nothing for the model; the engine says the same when it starts."""
        layout = self.parts[0].programs.placement.layout
        params = (spec.axes for part in self.parts for spec in part.specs)
        return [] if layout is None else without_effect(layout, self.model, params)

    def changed(self, where: Slice | None = None, **options: Any) -> Scenario:
        """The same with other chips or options."""
        return make_scenario(self.name, self.values, where or self.where, {**vars(self.args), **options})


def make_scenario(
    name: str, values: Mapping[str, Any], where: Slice, options: Mapping[str, Any], devices: Sequence[Any] | None = None
) -> Scenario:
    """Checks options against model and chips, and lays the model out.

    Args:
        options: of ``EngineArgs``; None is as if it were not there.
        devices: of one engine, to compile for; None: stand-ins.

    Raises:
        ParameterError: naming the option that does not fit, with the numbers.
    """
    args = EngineArgs(**{name: value for name, value in options.items() if value is not None})
    wanted = args.num_devices * args.data_parallel_size
    if wanted > where.num_devices and not where.is_cpu:
        raise ParameterError(
            "target",
            f"{where.name} has {where.num_devices} devices; tensor_parallel_size {args.tensor_parallel_size} x "
            f"pipeline_parallel_size {args.pipeline_parallel_size} x data_parallel_size {args.data_parallel_size} "
            f"are {wanted}",
        )
    model, specs = read_model(values)
    config = resolve(
        args, model_max_len=model.max_position, vocab_size=model.vocab_size, platform=where.target.platform
    )
    own_kv_heads, num_params = model.num_kv_heads, sum(math.prod(spec.shape) for spec in specs)
    with naming_what_was_given(args):
        model, specs, placements = place(args, model, specs, devices or where.stand_ins(args.num_devices))
        parts = tuple(
            StagePart(
                stage,
                StagePrograms(model, config, placement, stage),
                stage_specs(specs, stage, model.tied_embeddings),
                where.target.platform,
            )
            for stage, placement in placements
        )
        for part in parts:
            # What cannot be laid out should be said now.
            _ = part.weight_bytes, part.programs.device_bytes_per_block, part.programs.state_bytes
    repeats = model.num_kv_heads // own_kv_heads
    return Scenario(name, values, where, args, config, num_params, model, repeats, parts)
