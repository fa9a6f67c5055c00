"""Shows which device holds what of a model, or of one stage of it: as text, and as a picture.

Must not know how arrays are used; callers name them.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpage.parallel.mesh import MESH_AXES, shown_sizes
from jaxpage.parallel.sharding import Layout

Axes = Sequence[str | None]
MAX_DEVICES_NAMED = 4
"""Devices a cell of the picture lists."""


@dataclasses.dataclass(frozen=True)
class Held:
    """An array, or one in each of several layers that are alike, and the part of it that a device has.

    Attributes:
        path: with a star for the number of the layer.
        count: of layers that have it.
        local_bytes: on each device, all layers together.
    """

    path: str
    struct: jax.ShapeDtypeStruct
    axes: tuple[str | None, ...]
    count: int
    local_shape: tuple[int, ...]
    local_bytes: int


def held(layout: Layout, arrays: Mapping[str, tuple[Any, Axes]]) -> list[Held]:
    """What each device of the layout holds of ``arrays``: by path, such as layers.3.qkv, shape struct and logical axes.

    Raises:
        ParameterError: as ``Layout.laid_out`` does, for an array that the layout does not fit.
    """
    counts: collections.Counter[Any] = collections.Counter()
    for path, (struct, axes) in arrays.items():
        laid_out = layout.laid_out(struct, axes, path)
        counts[re.sub(r"\blayers\.\d+\b", "layers.*", path), laid_out, tuple(axes)] += 1
    rows = []
    for (path, struct, axes), count in counts.items():
        local = struct.sharding.shard_shape(struct.shape)
        rows.append(Held(path, struct, axes, count, local, count * math.prod(local) * struct.dtype.itemsize))
    return rows


def show_sharding(layout: Layout, arrays: Mapping[str, tuple[Any, Axes]]) -> str:
    """Two tables: each array with its split and a device's part of it; each device with its parts of the logical axes.

    Args:
        arrays: see ``held``.
    """
    rows = held(layout, arrays)
    total = sum(row.local_bytes for row in rows)
    table = [("array", "layers", "dtype", "shape", "split", "on each device", "MiB")]
    for row in rows:
        split = [f"{axis} / {layout.ways(axis)}" for axis in row.axes if axis is not None and layout.ways(axis) > 1]
        table.append(
            (
                row.path, str(row.count), row.struct.dtype.name, _shown_shape(row.struct.shape),
                ", ".join(split) or "whole", _shown_shape(row.local_shape), f"{row.local_bytes / 2**20:.2f}",
            )
        )  # fmt: skip
    table.append(("all", "", "", "", "", "", f"{total / 2**20:.2f}"))
    title = f"{layout.table.name} on {layout.mesh.size} devices ({shown_sizes(dict(layout.mesh.shape))})"
    return "\n\n".join([title, _aligned(table), _aligned(_parts_by_device(layout, rows))])


def _parts_by_device(layout: Layout, rows: Iterable[Held]) -> list[tuple[str, ...]]:
    used = dict.fromkeys(axis for row in rows for axis in row.axes if axis is not None and layout.ways(axis) > 1)
    along = [name for name in MESH_AXES if layout.mesh.shape[name] > 1]
    table = [("device", *along, *(f"{axis} (of {layout.ways(axis)})" for axis in used))]
    for device, place in zip(layout.mesh.devices.flat, np.ndindex(layout.mesh.devices.shape), strict=True):
        where: dict[str, int] = dict(zip(MESH_AXES, place, strict=True))
        parts = [str(_part(layout, axis, where)) for axis in used]
        table.append((str(device.id), *(str(where[name]) for name in along), *parts))
    return table


def _part(layout: Layout, axis: str, where: Mapping[str, int]) -> int:
    index = 0
    for name in layout.table.mesh_axes(axis):
        index = index * layout.mesh.shape[name] + where[name]
    return index


def _shown_shape(shape: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _aligned(table: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)


def plot_sharding(layout: Layout, arrays: Mapping[str, tuple[Any, Axes]], file: Path) -> None:
    """Writes a picture with a box an array, cut into the parts that devices hold; grey ones are whole on all.

    Needs matplotlib, which the extra ``plot`` brings.

    Args:
        arrays: see ``held``.
        file: with a suffix that matplotlib knows, such as .png or .svg.
    """
    from matplotlib.figure import Figure

    rows = held(layout, arrays)
    columns = min(4, len(rows))
    lines = -(-len(rows) // columns)
    figure = Figure(figsize=(3.2 * columns, 2.4 * lines), layout="constrained")
    figure.suptitle(f"{layout.table.name}: {shown_sizes(dict(layout.mesh.shape))}; numbers are devices")
    axes = figure.subplots(lines, columns, squeeze=False)
    for row, panel in zip(rows, axes.flat, strict=False):
        _draw(panel, row)
    for panel in axes.flat[len(rows) :]:
        panel.set_axis_off()
    figure.savefig(file, dpi=120)


def _draw(panel: Any, row: Held) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    # Drawn are the two dimensions that are cut into most parts, of equal ones the last.
    pieces = [size // local for size, local in zip(row.struct.shape, row.local_shape, strict=True)]
    order = sorted(range(len(pieces)), key=lambda axis: (pieces[axis], axis))
    down, across = sorted(order[-2:]) if len(pieces) > 1 else (None, order[-1])

    def span(index: Any, dimension: int | None) -> tuple[float, float]:
        if dimension is None:
            return 0.0, 1.0
        size = row.struct.shape[dimension]
        start, stop, _ = index[dimension].indices(size)
        return start / size, stop / size

    sharding: Any = row.struct.sharding
    holders: dict[Any, list[int]] = collections.defaultdict(list)
    for device, index in sharding.devices_indices_map(row.struct.shape).items():
        holders[span(index, across), span(index, down)].append(device.id)
    colours = colormaps["tab20"]
    for ((left, right), (top, bottom)), devices in holders.items():
        colour = "lightgrey" if len(holders) == 1 else colours(min(devices) % 20)
        panel.add_patch(Rectangle((left, top), right - left, bottom - top, facecolor=colour, edgecolor="white"))
        panel.text((left + right) / 2, (top + bottom) / 2, _named(devices), ha="center", va="center", fontsize=7)
    panel.set(xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[])
    panel.set_xlabel(_dimension(row, across), fontsize=8)
    panel.set_ylabel("" if down is None else _dimension(row, down), fontsize=8)
    panel.set_title(row.path + (f" (x {row.count})" if row.count > 1 else ""), fontsize=9)


def _dimension(row: Held, index: int) -> str:
    return f"{row.axes[index] or 'dimension'} {row.struct.shape[index]}"


def _named(devices: Sequence[int]) -> str:
    ids = sorted(devices)
    if len(ids) <= MAX_DEVICES_NAMED:
        return ", ".join(map(str, ids))
    step = ids[1] - ids[0]
    if ids == list(range(ids[0], ids[-1] + 1, step)):
        return f"{ids[0]} to {ids[-1]}" + (f" by {step}" if step > 1 else "")
    return f"{len(ids)} devices"
