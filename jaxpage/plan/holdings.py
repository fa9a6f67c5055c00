"""Which device holds what of a scenario: names its arrays for ``jaxpage.parallel.show``, which draws them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxpage.layers.linear import quantized_axes
from jaxpage.parallel.sharding import Layout
from jaxpage.parallel.show import plot_sharding, show_sharding
from jaxpage.plan.memory import find_memory
from jaxpage.plan.scenario import Scenario, StagePart
from pallas_kernels import QuantizedWeight


def show_holdings(scenario: Scenario) -> Iterator[str]:
    """The tables of each stage of one engine."""
    for title, layout, arrays in _stages(scenario):
        yield f"{title}\n{show_sharding(layout, arrays)}" if layout else f"{title}: all of it on one device"


def plot_holdings(scenario: Scenario, folder: str, name: str) -> list[Path]:
    """Writes a picture of each stage that is split; their paths."""
    files = []
    for index, (_, layout, arrays) in enumerate(_stages(scenario)):
        if layout is not None:
            suffix = f"_stage_{index}" if len(scenario.parts) > 1 else ""
            files.append(Path(folder, f"{name}{suffix}.png"))
            plot_sharding(layout, arrays, files[-1])
    return files


def _stages(scenario: Scenario) -> Iterator[tuple[str, Layout | None, Mapping[str, Any]]]:
    cache = find_memory(scenario).cache
    num_blocks = 2 if cache is None else cache.num_blocks  # one to use, where not one fits
    for part in scenario.parts:
        title = f"{scenario.name}, {scenario.sharding_name}"
        title += f", stage {part.stage.index}" if len(scenario.parts) > 1 else ""
        yield title, part.programs.placement.layout, dict(_arrays(part, num_blocks))


def _arrays(part: StagePart, num_blocks: int) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for spec in part.specs:
        path, stored = ".".join(map(str, spec.path)), part.param(spec)
        if isinstance(stored, QuantizedWeight):
            axes = quantized_axes(spec.axes, stored.kind)
            yield f"{path}.values", (stored.values, axes.values)
            yield f"{path}.scales", (stored.scales, axes.scales)
        else:
            yield path, (stored, spec.axes)
    for index, cache in enumerate(part.programs.cache_shapes(num_blocks)):
        for name, struct, axes in zip(cache._fields, cache, cache.axes, strict=True):
            if struct is not None:
                yield f"layers.{index}.kv_cache.{name}", (struct, axes)
