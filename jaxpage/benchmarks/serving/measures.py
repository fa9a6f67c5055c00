"""From records of requests to figures. Knows nothing of how they came about.

Names and meanings are those of vLLM's benchmark, so that results can be laid side by side: TTFT is the time to the
first token, TPOT the mean time of a request's further tokens, ITL each gap between pieces of an answer, E2EL the time
to the last token, all from the moment a request is sent. Percentiles are interpolated between neighbours.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxpage.benchmarks.serving.client import RequestRecord


def summarize(
    records: Sequence[RequestRecord],
    duration_s: float,
    percentiles: Sequence[float] = (50, 90, 99),
    goodput: Sequence[tuple[str, float]] | None = None,
) -> dict[str, Any]:
    """The result of a run under vLLM's keys.

    Args:
        percentiles: of each metric, in percent.
        goodput: limits in ms by metric; a request is good if it keeps all of them.
    """
    good = [record for record in records if record.error is None]
    num_prompt, num_output = (sum(getattr(r, f"num_{kind}_tokens") for r in good) for kind in ("prompt", "output"))
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(records) - len(good),
        "failures": dict(collections.Counter(r.error for r in records if r.error is not None).most_common()),
        "total_input_tokens": num_prompt,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / duration_s,
        "request_goodput": None,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_prompt + num_output) / duration_s,
        "max_output_tokens_per_s": float(max(tokens_in_bins(good), default=0.0)),
        "peak_concurrent_requests": max((count for _, count in concurrency(records)), default=0),
        "num_without_usage": sum(not record.is_counted for record in good),
    }
    if goodput:
        result["request_goodput"] = sum(keeps(record, goodput) for record in good) / duration_s
    for name, values_s in metric_values(good).items():
        result |= _statistics(name, np.asarray(values_s) * 1e3, percentiles)
    return result


def metric_values(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Seconds by metric, of requests that succeeded."""
    return {
        "ttft": [record.ttft_s for record in records],
        "tpot": [record.tpot_s for record in records if record.tpot_s is not None],
        "itl": [gap for record in records for gap in record.itls_s],
        "e2el": [record.e2el_s for record in records],
        "client_queue_time": [record.sent_s - record.due_s for record in records],
    }


def keeps(record: RequestRecord, limits_ms: Sequence[tuple[str, float]]) -> bool:
    """Whether a request kept all limits; an answer of one token has no TPOT to break."""
    return all((getattr(record, f"{name}_s") or 0.0) * 1e3 <= limit for name, limit in limits_ms)


def tokens_in_bins(records: Sequence[RequestRecord], width_s: float = 1.0) -> npt.NDArray[np.float64]:
    """Tokens by ``width_s`` since the first request was sent. A piece of an answer counts its share of the whole."""
    if not any(record.chunk_times for record in records):
        return np.zeros(0)
    start = min(record.sent_s for record in records)
    times = np.concatenate([np.asarray(record.chunk_times) for record in records]) - start
    weights = np.concatenate(
        [np.full(n := len(record.chunk_times), record.num_output_tokens / max(n, 1)) for record in records]
    )
    return np.bincount((times / width_s).astype(int), weights).astype(np.float64)


def concurrency(records: Sequence[RequestRecord]) -> list[tuple[float, int]]:
    """(time, requests in flight from then on), in order, failed ones included."""
    # At equal times ends come first: back-to-back requests never overlap.
    changes = sorted([(r.sent_s, 1) for r in records] + [(r.end_s, -1) for r in records])
    steps, count = [], 0
    for time_s, change in changes:
        count += change
        steps.append((time_s, count))
    return steps


def percentile_key(percentile: float, metric: str) -> str:
    """``p99_ttft_ms``, ``p99.9_ttft_ms``."""
    return f"p{percentile:g}_{metric}_ms"


def _statistics(name: str, values: npt.NDArray[np.float64], percentiles: Sequence[float]) -> dict[str, Any]:
    """None where there are no values: nothing was measured, which is not the same as 0."""
    figures: dict[str, Any] = {"mean": np.mean, "median": np.median, "std": np.std}
    result = {f"{figure}_{name}_ms": float(of(values)) if len(values) else None for figure, of in figures.items()}
    for percentile in percentiles:
        value = float(np.percentile(values, percentile)) if len(values) else None
        result[percentile_key(percentile, name)] = value
    return result


def details(records: Sequence[RequestRecord]) -> dict[str, list[Any]]:
    """Every request, for ``--save-detailed``; lists of equal length."""
    answered = [bool(record.chunk_times) for record in records]
    return {
        "input_lens": [record.num_prompt_tokens for record in records],
        "output_lens": [record.num_output_tokens for record in records],
        "start_times": [record.sent_s for record in records],
        "ttfts": [r.ttft_s if has else None for r, has in zip(records, answered, strict=True)],
        "itls": [record.itls_s for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [record.error or "" for record in records],
    }


def finite(value: float) -> float | str:
    """JSON has no infinity; vLLM writes it as this string."""
    return "inf" if math.isinf(value) else value
