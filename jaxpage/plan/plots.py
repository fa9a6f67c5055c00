"""Assessments as pictures. Computes nothing but units."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpage.errors import ParameterError
from jaxpage.plan.assess import Assessment

COLOURS = {
    "weights": "#2f6db5",
    "sampling state": "#7d8ba1",
    "temporaries": "#d1722c",
    "KV cache": "#3d9970",
}
LINES = {"compute": "#d1722c", "memory": "#2f6db5", "interconnect": "#3d9970"}
MOST_REQUESTS = 4096


def check_plots(folder: str) -> None:
    """Raises ParameterError if plots cannot be written: better before the work than after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ParameterError("plots", 'needs matplotlib: pip install "jaxpage[plot]"')
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ParameterError("plots", f"{folder}: {error.strerror or error}") from error


def draw_plots(folder: str, assessments: Sequence[Assessment]) -> list[Path]:
    """Writes memory.png and, where the chip's limits are known, roofline.png; their paths."""
    files = [Path(folder, "memory.png")]
    draw_memory(files[0], assessments)
    known = [assessment for assessment in assessments if assessment.chip is not None]
    if known:
        files.append(Path(folder, "roofline.png"))
        draw_roofline(files[1], known)
    return files


def draw_memory(path: Path, assessments: Sequence[Assessment]) -> None:
    """A bar for each stage of each: what is on its devices, and what they have."""
    from matplotlib.figure import Figure  # without pyplot there is no state and no window

    bars = [
        (assessment.scenario.sharding_name + (f", {stage.name}" if len(assessment.memory.stages) > 1 else ""), stage)
        for assessment in assessments
        for stage in assessment.memory.stages
    ]
    figure = Figure(figsize=(9, 1.8 + 0.6 * len(bars)), layout="constrained")
    axes: Any = figure.subplots()
    names = [name for name, _ in bars]
    left = [0.0] * len(bars)
    for part, colour in COLOURS.items():
        sizes = [
            {
                "weights": stage.weight_bytes,
                "sampling state": stage.state_bytes,
                "temporaries": stage.temp_bytes,
                "KV cache": stage.kv_bytes,
            }[part]
            / 2**30
            for _, stage in bars
        ]
        axes.barh(range(len(bars)), sizes, left=left, color=colour, label=part)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    for index, (_, stage) in enumerate(bars):
        if stage.usable_bytes is not None:
            usable = stage.usable_bytes / 2**30
            axes.plot([usable, usable], [index - 0.45, index + 0.45], color="black", label=None if index else "usable")
    axes.set_yticks(range(len(bars)), names)
    axes.invert_yaxis()
    axes.set_xlabel("GiB of a device")
    axes.set_title(_title(assessments[0]))
    figure.legend(loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=120)


def draw_roofline(path: Path, assessments: Sequence[Assessment]) -> None:
    """Left the time of a decode step by resource, right the rate it allows, by requests at once."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    sizes = [2**power for power in range(MOST_REQUESTS.bit_length())]
    first = [assessments[0].decode(size) for size in sizes]
    for resource, colour in LINES.items():
        times = [rate.times[resource] * 1e3 for rate in first]
        if any(times):
            left.plot(sizes, times, color=colour, label=resource)
    left.set_ylabel(f"ms a step, {assessments[0].scenario.sharding_name}")
    for assessment in assessments:
        rates = [assessment.decode(size) for size in sizes]
        held = [rate for rate in rates if rate.fits]
        (line,) = right.plot(sizes, [rate.tokens_per_s for rate in rates], linestyle=":", linewidth=1)
        right.plot(
            [rate.size for rate in held], [rate.tokens_per_s for rate in held], color=line.get_color(), linewidth=2,
            label=assessment.scenario.sharding_name,
        )  # fmt: skip
    right.set_ylabel("tok/s at most; dotted: more than the cache holds")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel(f"requests at once, {assessments[0].context:,} tokens each")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(_title(assessments[0]))
    figure.savefig(path, dpi=120)


def _title(assessment: Assessment) -> str:
    scenario = assessment.scenario
    return f"{scenario.name} on {scenario.where.name}, {scenario.type_name}"
