"""The result of a run as people read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxpage.benchmarks.report import table
from jaxpage.benchmarks.serving.measures import percentile_key

TITLES = {
    "ttft": "time to first token (TTFT)",
    "tpot": "time per further token (TPOT)",
    "itl": "between pieces (ITL)",
    "e2el": "to the last token (E2EL)",
    "client_queue_time": "waited before it was sent",
}


def summary(result: dict[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """Totals, a table of times, failures by reason, and whatever makes the figures doubtful."""
    goodput = result["request_goodput"]
    totals = [
        ("requests answered", f"{result['completed']}"),
        ("requests failed", f"{result['failed']}"),
        ("duration", f"{result['duration']:.2f} s"),
        ("prompt tokens", f"{result['total_input_tokens']}"),
        ("generated tokens", f"{result['total_output_tokens']}"),
        ("requests a second", f"{result['request_throughput']:.2f}"),
        *([("good requests a second", f"{goodput:.2f}")] if goodput is not None else []),
        ("generated tokens a second", f"{result['output_throughput']:.1f}"),
        ("all tokens a second", f"{result['total_token_throughput']:.1f}"),
        ("most requests at once", f"{result['peak_concurrent_requests']}"),
    ]
    lines = [f"{name:<27}{value:>14}" for name, value in totals]
    rows = [
        {
            "ms": TITLES[name],
            **{figure: result[f"{figure}_{name}_ms"] for figure in ("mean", "std")},
            **{f"p{percentile:g}": result[percentile_key(percentile, name)] for percentile in percentiles},
        }
        for name in metrics
    ]
    lines += ["", table(rows)]
    if result["failures"]:
        lines += ["", "failed requests by reason:"]
        lines += [f"{count:6d}  {reason}" for reason, count in result["failures"].items()]
    lines += [f"note: {note}" for note in notes(result)]
    return "\n".join(lines)


def notes(result: dict[str, Any]) -> list[str]:
    """What a reader must know before believing the figures."""
    found = []
    if result["num_without_usage"]:
        found.append(f"{result['num_without_usage']} answers came without usage: their tokens are the pieces counted")
    share = result.get("client_cpu_s", 0.0) / result["duration"]  # without a server there is no client
    if share > 0.8:
        found.append(f"this client used {share:.0%} of a processor core: it may be what limits the figures")
    return found
