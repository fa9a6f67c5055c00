"""Draws a run: distributions of TTFT and ITL, tokens a second and requests in flight over time."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpage.benchmarks.serving.client import RequestRecord
from jaxpage.benchmarks.serving.measures import concurrency, metric_values, tokens_in_bins
from jaxpage.errors import ParameterError

BINS = 50
BLUE, ORANGE = "#2f6db5", "#d1722c"


def check_plot(path: str) -> None:
    """Raises ParameterError if a plot cannot be written: better before the run than after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ParameterError("plot", 'needs matplotlib: pip install "jaxpage[plot]"')
    if not Path(path).absolute().parent.is_dir():
        raise ParameterError("plot", f"no such directory: {Path(path).parent}")
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if Path(path).suffix.lstrip(".").lower() not in kinds:
        raise ParameterError(
            "plot", f"must end in one of {', '.join(f'.{kind}' for kind in sorted(kinds))}, got {path}"
        )


def draw(path: str, title: str, records: Sequence[RequestRecord]) -> None:
    """Writes the picture; its kind is the file's suffix."""
    from matplotlib.figure import Figure  # without pyplot there is no state and no window

    good = [record for record in records if record.error is None]
    values = metric_values(good)
    figure = Figure(figsize=(11, 7), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(2, 2)
    _distribution(axes[0][0], values["ttft"], "time to first token, ms", "requests")
    _distribution(axes[0][1], values["itl"], "time between pieces of an answer, ms", "pieces")
    _throughput(axes[1][0], good)
    _in_flight(axes[1][1], records)
    figure.savefig(path, dpi=120)


def _distribution(axes: Any, values_s: list[float], label: str, counted: str) -> None:
    axes.set_xlabel(label)
    axes.set_ylabel(counted)
    if not values_s:
        return
    values = np.asarray(values_s) * 1e3
    # The last hundredth would press all others into one bar.
    shown = values[values <= np.percentile(values, 99)]
    axes.hist(shown, bins=BINS, color=BLUE)
    for percentile, style in ((50, "-"), (90, "--"), (99, ":")):
        value = float(np.percentile(values, percentile))
        axes.axvline(value, color=ORANGE, linestyle=style, label=f"p{percentile} {value:.1f}")
    axes.legend()


def _throughput(axes: Any, records: Sequence[RequestRecord]) -> None:
    length_s = max((r.end_s for r in records), default=0.0) - min((r.sent_s for r in records), default=0.0)
    width_s = min(1.0, max(length_s, 1e-3) / BINS)  # seconds, or finer where the run is short
    rates = tokens_in_bins(records, width_s) / width_s
    axes.step((np.arange(len(rates)) + 0.5) * width_s, rates, where="mid", color=BLUE)
    axes.set_xlabel("time, s")
    axes.set_ylabel("generated tokens a second")
    axes.set_ylim(bottom=0)


def _in_flight(axes: Any, records: Sequence[RequestRecord]) -> None:
    steps = concurrency(records)
    start = steps[0][0] if steps else 0.0
    axes.step([time_s - start for time_s, _ in steps], [count for _, count in steps], where="post", color=BLUE)
    failed = [record.end_s - start for record in records if record.error is not None]
    if failed:
        axes.plot(failed, [0] * len(failed), "x", color=ORANGE, label="failed", clip_on=False)
        axes.legend()
    axes.set_xlabel("time, s")
    axes.set_ylabel("requests in flight")
    axes.set_ylim(bottom=0)
