"""The engine's state in a line, from the same numbers that ``/metrics`` shows."""

from __future__ import annotations

from jaxpage.metrics.engine_metrics import EngineMetrics, Numbers, SummedMetrics


class StatusLine:
    """Says what an engine has done since the last line, and where it stands."""

    def __init__(self, metrics: EngineMetrics | SummedMetrics, now_s: float) -> None:
        self._metrics = metrics
        self._last = metrics.read()
        self._last_s = now_s

    def age_s(self, now_s: float) -> float:
        """Seconds since the last line."""
        return now_s - self._last_s

    def next(self, now_s: float) -> tuple[str, dict[str, float | int]]:
        """The line, and its figures by name for a structured log; ``now_s`` is monotonic."""
        last, now = self._last, self._metrics.read()
        seconds = max(now_s - self._last_s, 1e-9)
        self._last, self._last_s = now, now_s
        figures = _figures(last, now, seconds)
        text = (
            "running {num_running}, waiting {num_waiting} (swapped {num_swapped}), "
            "KV blocks in use {kv_cache_usage:.0%}, prefix hits {prefix_hit_rate:.0%}, preemptions {num_preemptions}, "
            "prompt {prompt_tokens_per_s:.1f} tok/s, generation {generation_tokens_per_s:.1f} tok/s"
        )
        return text.format(**figures), figures


def _figures(last: Numbers, now: Numbers, seconds: float) -> dict[str, float | int]:
    queried = now.counts.num_queried_tokens - last.counts.num_queried_tokens
    found = now.counts.num_cached_tokens - last.counts.num_cached_tokens
    return {
        "num_running": now.counts.num_running,
        "num_waiting": now.counts.num_waiting,
        "num_swapped": now.counts.num_swapped,
        "kv_cache_usage": round(now.counts.kv_usage, 4),
        "prefix_hit_rate": round(found / max(1, queried), 4),
        "num_preemptions": now.counts.num_preemptions - last.counts.num_preemptions,
        "prompt_tokens_per_s": round((now.counts.num_prompt_tokens - last.counts.num_prompt_tokens) / seconds, 1),
        "generation_tokens_per_s": round((now.num_generation_tokens - last.num_generation_tokens) / seconds, 1),
    }
