"""The page of metrics: what is on it before anything has happened, and that Prometheus reads it.

promtool is Prometheus' own checker. Where it is not on PATH, only Prometheus' Python parser reads the page, which is as
strict about the syntax; that every family has its help and its type is checked in either case.
"""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from scrapes import Scrape, check_idle

from jaxpage.metrics import CacheInfo, EngineCounts, EngineMetrics, ServerMetrics, StatusLine
from jaxpage.metrics.histogram import Histogram, token_count_bounds
from jaxpage.metrics.prometheus import Exporter

CACHE = CacheInfo(
    block_size=16,
    num_blocks=33,
    num_usable_blocks=32,
    cache_dtype="int8",
    enable_prefix_caching=True,
    max_model_len=128,
)
GAUGES = {
    "num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "num_requests_swapped",
    "kv_cache_usage_perc", "host_cache_usage_perc", "cache_config_info",
}  # fmt: skip
COUNTERS = {
    "prompt_tokens", "prompt_tokens_by_source", "prompt_tokens_cached", "generation_tokens", "prefix_cache_queries",
    "prefix_cache_hits", "num_preemptions", "preempted_tokens", "recomputed_tokens", "swap_blocks", "request_success",
    "admission_rejections", "corrupted_requests", "step_faults", "compilations",
}  # fmt: skip
LATENCIES = "0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 240.0 480.0 960.0 1920.0 7680.0"
FIRST = "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0 160.0 640.0 2560.0"
BETWEEN = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0"
TOKENS = "1.0 2.0 5.0 10.0 20.0 50.0 100.0"
STEPS = "1.0 8.0 16.0 32.0 64.0 128.0 256.0 512.0 1024.0 2048.0 4096.0 8192.0 16384.0"
HISTOGRAMS = {
    "time_to_first_token_seconds": FIRST,
    "inter_token_latency_seconds": BETWEEN,
    "request_time_per_output_token_seconds": BETWEEN,
    "e2e_request_latency_seconds": LATENCIES,
    "request_queue_time_seconds": LATENCIES,
    "request_prefill_time_seconds": LATENCIES,
    "request_decode_time_seconds": LATENCIES,
    "request_inference_time_seconds": LATENCIES,
    "request_prompt_tokens": TOKENS,
    "request_prefill_kv_computed_tokens": TOKENS,
    "request_num_preemptions": "1.0 2.0 3.0 4.0 5.0 10.0 20.0",
    "request_params_n": "1.0 2.0 5.0 10.0 20.0",
    "request_params_max_tokens": TOKENS,
    "request_max_num_generation_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
    "iteration_tokens_total": STEPS,
}
LABELS = {
    "num_requests_waiting_by_reason": {"reason": {"capacity", "deferred"}},
    "prompt_tokens_by_source_total": {"source": {"local_compute", "local_cache_hit", "external_kv_transfer"}},
    "preempted_tokens_total": {"kind": {"recompute", "swap"}},
    "swap_blocks_total": {"direction": {"in", "out"}},
    "request_success_total": {"finished_reason": {"stop", "length", "abort", "error"}},
    "admission_rejections_total": {"reason": {"max_num_queued_reqs", "max_num_queued_tokens"}},
    "compilations_total": {"phase": {"warmup", "serving"}},
}
LINT = (r"metric names should not contain \':\'", r'non-counter metrics should not have "_total" suffix')
"""What promtool has to say about vLLM's names, which are ours."""


@pytest.fixture
def server() -> ServerMetrics:
    server = ServerMetrics()
    server.expect("POST", ["/v1/completions"])
    return server


@pytest.fixture
def page(server: ServerMetrics) -> str:
    return Exporter('the "model"', [EngineMetrics(CACHE)], server).text().decode()


def test_everything_is_there_with_0_from_the_start(page: str) -> None:
    first = Scrape(page.encode())
    check_idle(first)
    types = {name.removeprefix("jaxpage:"): kind for name, kind in first.types.items()}
    expected = (
        dict.fromkeys(GAUGES, "gauge") | dict.fromkeys(COUNTERS, "counter") | dict.fromkeys(HISTOGRAMS, "histogram")
    )
    assert {name: kind for name, kind in types.items() if not name.startswith("http_")} == expected
    assert not {key: value for key, value in first.items() if value} or [
        key for key, value in first.items() if value
    ] == [next(key for key in first if key.startswith("cache_config_info"))]
    for name, labels in LABELS.items():
        for label, values in labels.items():
            assert set(re.findall(rf'^jaxpage:{name}{{.*{label}="(\w+)"', page, re.M)) == values
    assert first['http_requests_total{handler="/v1/completions",method="POST",status="4xx"}'] == 0
    assert first['http_request_duration_seconds_count{handler="/v1/completions",method="POST"}'] == 0


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_bounds(page: str, name: str) -> None:
    bounds = re.findall(rf'^jaxpage:{name}_bucket{{.*le="([^"]+)"', page, re.M)
    assert bounds == [*HISTOGRAMS[name].split(), "+Inf"]


def test_labels(page: str, server: ServerMetrics) -> None:
    assert 'jaxpage:num_requests_running{engine="0",model_name="the \\"model\\""} 0.0' in page
    assert (
        'jaxpage:cache_config_info{block_size="16",cache_dtype="int8",enable_prefix_caching="True",engine="0",'
        'kv_cache_max_concurrency="4.00",kv_cache_size_tokens="512",num_blocks="33"} 1.0'
    ) in page
    two = Exporter("m", [EngineMetrics(CACHE), EngineMetrics(CACHE)], server).text().decode()
    assert set(re.findall(r'num_requests_running{engine="(\d)"', two)) == {"0", "1"}


def test_prometheus_reads_it(page: str) -> None:
    for name in GAUGES | {f"{name}_total" for name in COUNTERS} | HISTOGRAMS.keys():
        described = re.findall(rf"^# (HELP|TYPE) jaxpage:{name} \S", page, re.M)
        assert described == ["HELP", "TYPE"], name
    promtool = shutil.which("promtool")
    if promtool is None:
        Scrape(page.encode())
        return
    done = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, text=True, timeout=60)
    complaints = [line for line in done.stderr.splitlines() if not any(re.search(each, line) for each in LINT)]
    assert (complaints, done.stdout) == ([], "")
    assert done.returncode in (0, 3), "3 stands for the style of names; anything else is an error"


def test_histograms_count_up_to_and_including_a_bound() -> None:
    histogram = Histogram((1, 2, 5))
    for value in (0, 1, 1.5, 2, 7):
        histogram.observe(value)
    histogram.observe(5, count=3)
    assert (histogram.counts, histogram.total, histogram.num_observations) == ([2, 2, 3, 1], 26.5, 8)
    copy = histogram.copy()
    histogram.observe(1)
    assert (copy.counts, copy.total) == ([2, 2, 3, 1], 26.5)


@pytest.mark.parametrize(
    ("largest", "bounds"), [(1, (1,)), (19, (1, 2, 5, 10)), (2000, (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000))]
)
def test_token_counts_have_bounds_up_to_the_longest(largest: int, bounds: tuple[int, ...]) -> None:
    assert token_count_bounds(largest) == bounds


def test_calls(server: ServerMetrics) -> None:
    server.called("POST", 200, "/v1/completions", 0.3)
    server.called("POST", 503, "/v1/completions", 0.001)
    server.called("BREW", 405, "/v1/completions", 0.001)
    server.called("STEEP", 405, "/v1/completions", 0.001)
    server.reject("max_num_queued_reqs")
    page = Scrape(Exporter("m", [EngineMetrics(CACHE)], server).text())
    assert page['http_requests_total{handler="/v1/completions",method="POST",status="2xx"}'] == 1
    assert page['http_requests_total{handler="/v1/completions",method="POST",status="5xx"}'] == 1
    assert page['http_requests_total{handler="/v1/completions",method="other",status="4xx"}'] == 2
    assert page['http_request_duration_seconds_count{handler="/v1/completions",method="POST"}'] == 2
    assert page['admission_rejections_total{reason="max_num_queued_reqs"}'] == 1


def test_the_status_line_is_about_the_time_since_the_last_one() -> None:
    metrics = EngineMetrics(CACHE)
    status = StatusLine(metrics, now_s=100.0)
    metrics.numbers.counts = EngineCounts(
        num_running=3, num_waiting=2, num_swapped=1, kv_usage=0.5,
        num_prompt_tokens=400, num_cached_tokens=100, num_queried_tokens=400, num_preemptions=1,
    )  # fmt: skip
    metrics.numbers.num_generation_tokens = 50
    assert status.age_s(110.0) == 10
    text, figures = status.next(110.0)
    assert text == (
        "running 3, waiting 2 (swapped 1), KV blocks in use 50%, prefix hits 25%, preemptions 1, "
        "prompt 40.0 tok/s, generation 5.0 tok/s"
    )
    assert figures["generation_tokens_per_s"] == 5
    assert "prefix hits 0%, preemptions 0, prompt 0.0 tok/s, generation 0.0 tok/s" in status.next(120.0)[0]
