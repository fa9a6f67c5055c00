"""Names and shapes of everything that ``GET /metrics`` shows. vLLM's names with ``jaxpage:`` in place of ``vllm:``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from jaxpage.metrics.engine_metrics import EngineMetrics, Numbers
from jaxpage.metrics.histogram import Histogram
from jaxpage.metrics.server_metrics import ServerMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "jaxpage:"
LABELS = ("model_name", "engine")
Labelled = tuple[list[str], Numbers]
"""The values of LABELS, and an engine's numbers."""

GAUGES = {
    "num_requests_running": ("num_running", "Samples in the running set."),
    "num_requests_waiting": ("num_waiting", "Samples that wait: never admitted, preempted or swapped out."),
    "num_requests_swapped": ("num_swapped", "Waiting samples whose blocks are in host memory."),
    "kv_cache_usage_perc": ("kv_usage", "Share of the KV blocks that live samples hold, 0 to 1."),
    "host_cache_usage_perc": ("host_usage", "Share of the host's KV blocks that are in use, 0 to 1."),
}
COUNTERS = {
    "prompt_tokens": ("num_prompt_tokens", "Prompt tokens of admitted prompts, once each, cached or not."),
    "prompt_tokens_cached": ("num_cached_tokens", "Prompt tokens that were not computed."),
    "prefix_cache_queries": ("num_queried_tokens", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("num_cached_tokens", "Prompt tokens found in the prefix cache."),
    "num_preemptions": ("num_preemptions", "Preemptions of samples."),
    "recomputed_tokens": ("num_recomputed_tokens", "Tokens prefilled again after a preemption."),
    "corrupted_requests": ("num_corrupted", "Samples that ended because their logits were not numbers."),
    "step_faults": ("num_faults", "Steps that failed, and whose requests were computed again."),
}
LABELLED_COUNTERS = {
    "preempted_tokens": (
        "kind",
        {"recompute": "num_recompute_tokens", "swap": "num_swap_tokens"},
        "Tokens whose keys and values preemptions gave up.",
    ),
    "swap_blocks": (
        "direction",
        {"out": "num_swapped_out_blocks", "in": "num_swapped_in_blocks"},
        "Blocks moved between the device and host memory.",
    ),
    "compilations": (
        "phase",
        {"warmup": "num_warmup_compilations", "serving": "num_serving_compilations"},
        "XLA compilations before and after the engine was ready.",
    ),
}
HISTOGRAMS = {
    "time_to_first_token_seconds": "Time from a prompt's arrival to its first token.",
    "inter_token_latency_seconds": "Time from an output of a sample to its next.",
    "request_time_per_output_token_seconds": "Mean time between the tokens of a sample.",
    "e2e_request_latency_seconds": "Time from a prompt's arrival to the end of its last sample.",
    "request_queue_time_seconds": "Time from a prompt's arrival to its first admission.",
    "request_prefill_time_seconds": "Time from a prompt's first admission to its first token.",
    "request_decode_time_seconds": "Time from a prompt's first token to its last.",
    "request_inference_time_seconds": "Time from a prompt's first admission to its last token.",
    "request_prompt_tokens": "Tokens of a prompt.",
    "request_prefill_kv_computed_tokens": "Tokens of a prompt that were not cached.",
    "request_num_preemptions": "Preemptions of a prompt's samples.",
    "request_params_n": "Samples asked for.",
    "request_params_max_tokens": "Tokens a sample may have, the room in the context considered.",
    "request_max_num_generation_tokens": "Tokens of the longest sample of a prompt.",
    "request_generation_tokens": "Tokens of a sample.",
    "iteration_tokens_total": "Tokens prefilled and generated in a step of the engine.",
}


SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
WAITING_REASONS = ("capacity", "deferred")


class Exporter:
    """Shows engines, labelled by their place in the list, and the server around them, under one model name."""

    def __init__(self, model_name: str, engines: Sequence[EngineMetrics], server: ServerMetrics) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Families(model_name, engines, server))

    def text(self) -> bytes:
        """The page, of ``CONTENT_TYPE``. Takes about two milliseconds."""
        return generate_latest(self._registry)


class _Families(Collector):
    """Gives Prometheus' client the metrics each time it asks, all those of an engine from one moment."""

    def __init__(self, model_name: str, engines: Sequence[EngineMetrics], server: ServerMetrics) -> None:
        self._model_name = model_name
        self._engines = engines
        self._server = server

    def collect(self) -> Iterator[Metric]:
        engines = [([self._model_name, str(place)], each.read()) for place, each in enumerate(self._engines)]
        yield from _gauges(engines)
        yield _cache_config_info(self._engines)
        yield from _counters(engines)
        yield from _histograms(engines)
        yield from _server_families(self._model_name, self._server)


def _gauges(engines: list[Labelled]) -> Iterator[Metric]:
    for name, (field, text) in GAUGES.items():
        rows = [(labels, getattr(numbers.counts, field)) for labels, numbers in engines]
        yield _filled(GaugeMetricFamily(PREFIX + name, text, labels=LABELS), rows)
    rows = [
        ([*labels, reason], value)
        for labels, numbers in engines
        for reason, value in zip(
            WAITING_REASONS,
            (numbers.counts.num_waiting - numbers.counts.num_deferred, numbers.counts.num_deferred),
            strict=True,
        )
    ]
    text = "Waiting samples: for room, or (deferred) for another sample that computes their prompt."
    name = PREFIX + "num_requests_waiting_by_reason"
    yield _filled(GaugeMetricFamily(name, text, labels=[*LABELS, "reason"]), rows)


def _cache_config_info(engines: Sequence[EngineMetrics]) -> Metric:
    labels = ["block_size", "num_blocks", "cache_dtype", "enable_prefix_caching"]
    labels += ["kv_cache_size_tokens", "kv_cache_max_concurrency", "engine"]
    rows = []
    for place, cache in enumerate(engine.cache for engine in engines):
        size = cache.num_usable_blocks * cache.block_size
        values = [cache.block_size, cache.num_blocks, cache.cache_dtype, cache.enable_prefix_caching, size]
        rows.append(([*map(str, values), f"{size / cache.max_model_len:.2f}", str(place)], 1))
    return _filled(GaugeMetricFamily(PREFIX + "cache_config_info", "Facts about the KV cache.", labels=labels), rows)


def _counters(engines: list[Labelled]) -> Iterator[Metric]:
    for name, (field, text) in COUNTERS.items():
        yield _counter(name, text, [(labels, getattr(numbers.counts, field)) for labels, numbers in engines])
    rows = [(labels, numbers.num_generation_tokens) for labels, numbers in engines]
    yield _counter("generation_tokens", "Tokens accepted into outputs, ending tokens included.", rows)
    for name, (label, fields, text) in LABELLED_COUNTERS.items():
        split = [
            ([*labels, value], getattr(numbers.counts, field))
            for labels, numbers in engines
            for value, field in fields.items()
        ]
        yield _counter(name, text, split, label)
    by_source = [([*labels, source], value) for labels, numbers in engines for source, value in _sources(numbers)]
    yield _counter("prompt_tokens_by_source", "Prompt tokens by where their KV came from.", by_source, "source")
    ended = [([*labels, why], count) for labels, numbers in engines for why, count in numbers.num_ended.items()]
    yield _counter("request_success", "Samples that ended, by reason.", ended, "finished_reason")


def _sources(numbers: Numbers) -> Iterable[tuple[str, int]]:
    """Prompts are not looked up in host memory, so nothing comes from there."""
    cached = numbers.counts.num_cached_tokens
    return zip(SOURCES, (numbers.counts.num_prompt_tokens - cached, cached, 0), strict=True)


def _histograms(engines: list[Labelled]) -> Iterator[Metric]:
    for name, text in HISTOGRAMS.items():
        rows = [(labels, getattr(numbers.histograms, name)) for labels, numbers in engines]
        yield _histogram(PREFIX + name, text, LABELS, rows)


def _server_families(model_name: str, server: ServerMetrics) -> Iterator[Metric]:
    rejected = CounterMetricFamily(
        PREFIX + "admission_rejections",
        "Calls refused with 503, by the limit reached.",
        labels=["model_name", "reason"],
    )
    yield _filled(rejected, [([model_name, reason], count) for reason, count in server.num_rejections.items()])
    calls = CounterMetricFamily("http_requests", "Calls answered.", labels=["method", "status", "handler"])
    yield _filled(calls, [(list(key), count) for key, count in server.num_calls.items()])
    durations = [(list(key), histogram) for key, histogram in server.durations.items()]
    text = "Time until the last byte of an answer was sent."
    yield _histogram("http_request_duration_seconds", text, ("method", "handler"), durations)


def _counter(name: str, text: str, rows: Iterable[tuple[list[str], float]], *more_labels: str) -> Metric:
    return _filled(CounterMetricFamily(PREFIX + name, text, labels=[*LABELS, *more_labels]), rows)


def _histogram(name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[list[str], Histogram]]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, histogram in rows:
        sums = list(accumulate(histogram.counts))
        bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
        family.add_metric(values, list(zip(bounds, sums, strict=True)), sum_value=histogram.total)
    return family


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily, rows: Iterable[tuple[list[str], float]]
) -> GaugeMetricFamily | CounterMetricFamily:
    for labels, value in rows:
        family.add_metric(labels, value)
    return family
