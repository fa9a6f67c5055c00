"""The load generator's figures against ones computed by hand, and its arrivals."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from jaxpage.benchmarks.serving.arrivals import arrival_times
from jaxpage.benchmarks.serving.client import RequestRecord
from jaxpage.benchmarks.serving.measures import concurrency, details, keeps, summarize, tokens_in_bins
from jaxpage.benchmarks.serving.plot import check_plot, draw
from jaxpage.benchmarks.serving.summary import summary
from jaxpage.errors import ParameterError

METRICS = ("ttft", "tpot", "itl", "e2el")


def record(sent_s: float, *chunks: float, tokens: int | None = None, prompt: int = 10) -> RequestRecord:
    """A request sent and answered at the given seconds."""
    made = RequestRecord(prompt, due_s=sent_s - 0.25, sent_s=sent_s, end_s=chunks[-1], chunk_times=list(chunks))
    made.num_output_tokens = len(chunks) if tokens is None else tokens
    made.is_counted = True
    return made


def failed(sent_s: float, end_s: float, error: str) -> RequestRecord:
    return RequestRecord(10, due_s=sent_s, sent_s=sent_s, end_s=end_s, error=error)


RECORDS = [
    record(0.0, 1.0, 1.5, 2.0),  # ttft 1000, tpot 500, e2el 2000
    record(0.5, 1.0, 3.0, tokens=5),  # ttft 500, tpot 2000 / 4 = 500, e2el 2500
    record(1.0, 1.25),  # ttft 250, no tpot, e2el 250
    failed(2.0, 4.0, "HTTP 503: full"),
    failed(2.0, 2.5, "HTTP 503: full"),
    failed(3.0, 3.5, "connection refused"),
]


def test_totals() -> None:
    result = summarize(RECORDS, duration_s=4.0)
    assert (result["completed"], result["failed"]) == (3, 3)
    assert result["failures"] == {"HTTP 503: full": 2, "connection refused": 1}
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 9)
    assert result["request_throughput"] == 0.75
    assert result["output_throughput"] == 2.25
    assert result["total_token_throughput"] == 39 / 4
    assert result["request_goodput"] is None
    assert result["num_without_usage"] == 0


def test_percentiles_means_and_deviations() -> None:
    result = summarize(RECORDS, 4.0, percentiles=(0, 50, 90, 99.9))
    # TTFT 250, 500, 1000: the 90th lies 0.8 of the way from the second to the third.
    assert result["mean_ttft_ms"] == pytest.approx(1750 / 3)
    assert result["median_ttft_ms"] == 500
    assert result["std_ttft_ms"] == pytest.approx(math.sqrt((333.3333**2 + 83.3333**2 + 416.6667**2) / 3), rel=1e-5)
    assert (result["p0_ttft_ms"], result["p50_ttft_ms"]) == (250, 500)
    assert result["p90_ttft_ms"] == pytest.approx(900)
    assert result["p99.9_ttft_ms"] == pytest.approx(999)
    assert (result["mean_tpot_ms"], result["std_tpot_ms"]) == (500, 0)
    # Gaps 500, 500, 2000: of pieces, however many tokens a piece has.
    assert (result["mean_itl_ms"], result["median_itl_ms"]) == (1000, 500)
    assert result["p90_itl_ms"] == pytest.approx(1700)
    assert result["mean_e2el_ms"] == pytest.approx(4750 / 3)
    assert result["mean_client_queue_time_ms"] == 250


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    def goodput(*limits: tuple[str, float]) -> float:
        return summarize(RECORDS, 2.0, goodput=limits)["request_goodput"] * 2

    assert goodput(("ttft", 1000)) == 3
    assert goodput(("ttft", 999)) == 2
    assert goodput(("ttft", 500), ("e2el", 2500)) == 2
    assert goodput(("ttft", 500), ("e2el", 2499)) == 1
    assert goodput(("tpot", 499)) == 1, "an answer of one token has no TPOT to break"
    assert goodput(("e2el", 1)) == 0
    assert keeps(RECORDS[0], [("tpot", 500)])


def test_nothing_measured_is_not_zero() -> None:
    result = summarize([failed(0, 1, "x")], 1.0)
    assert (result["mean_ttft_ms"], result["p99_itl_ms"]) == (None, None)
    assert (result["completed"], result["peak_concurrent_requests"], result["max_output_tokens_per_s"]) == (0, 1, 0)
    assert "requests failed                         1" in summary(result | {"client_cpu_s": 0.0}, METRICS, (50, 90, 99))


def test_timelines() -> None:
    # Second 0: 0 tokens; 1: two pieces of the first, 2.5 tokens of the second, one; 2: one; 3: 2.5.
    assert tokens_in_bins(RECORDS[:3]).tolist() == [0, 5.5, 1, 2.5]
    assert tokens_in_bins(RECORDS[:1], width_s=0.5).tolist() == [0, 0, 1, 1, 1]
    assert concurrency(RECORDS[:3]) == [(0.0, 1), (0.5, 2), (1.0, 3), (1.25, 2), (2.0, 1), (3.0, 0)]
    back_to_back = [record(0.0, 1.0), record(1.0, 2.0)]
    assert max(count for _, count in concurrency(back_to_back)) == 1


def test_summary_names_failures_and_doubts() -> None:
    result = summarize(RECORDS, 4.0, goodput=[("ttft", 600)]) | {"client_cpu_s": 3.6, "num_without_usage": 2}
    text = summary(result, METRICS, (50, 90, 99))
    assert "     2  HTTP 503: full\n     1  connection refused" in text
    assert "good requests a second               0.50" in text
    assert "note: 2 answers came without usage" in text
    assert "note: this client used 90% of a processor core" in text
    assert "note" not in summary(summarize(RECORDS, 4.0), METRICS, (50, 90, 99))


def test_details_are_one_a_request() -> None:
    found = details(RECORDS)
    assert {len(values) for values in found.values()} == {6}
    assert found["ttfts"] == [1.0, 0.5, 0.25, None, None, None]
    assert found["errors"][3] == "HTTP 503: full"
    assert json.loads(json.dumps(found)) == found


def test_plots(tmp_path: Path) -> None:
    for records in (RECORDS, RECORDS[3:], []):
        file = tmp_path / f"{len(records)}.png"
        draw(str(file), "title", records)
        assert file.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ParameterError, match=r"must end in one of .*\.png"):
        check_plot(str(tmp_path / "a.docx"))
    with pytest.raises(ParameterError, match="no such directory"):
        check_plot(str(tmp_path / "missing" / "a.png"))
    check_plot(str(tmp_path / "a.png"))


def test_plots_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ParameterError, match=r'needs matplotlib: pip install "jaxpage\[plot\]"'):
        check_plot("a.png")


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 5.0])
def test_arrivals_have_the_rate_and_the_burstiness_asked_for(burstiness: float) -> None:
    times = arrival_times(20_000, 50.0, burstiness, np.random.default_rng(0))
    gaps = np.diff(times, prepend=0.0)
    assert times[-1] == pytest.approx(400)
    assert (gaps >= 0).all()
    # A gamma distribution of shape k has variation 1 / sqrt(k).
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_poisson_arrivals_fall_into_equal_times_as_they_should() -> None:
    counts = np.bincount(arrival_times(20_000, 50.0, 1.0, np.random.default_rng(1)).astype(int))[:400]
    assert np.var(counts) / np.mean(counts) == pytest.approx(1, rel=0.2)


def test_arrivals_are_seeded_and_may_be_all_at_once() -> None:
    def draw_times(seed: int) -> list[float]:
        return arrival_times(10, 2.0, 1.0, np.random.default_rng(seed)).tolist()

    assert draw_times(3) == draw_times(3) != draw_times(4)
    assert arrival_times(3, math.inf, 1.0, np.random.default_rng(0)).tolist() == [0, 0, 0]
    assert arrival_times(0, 2.0, 1.0, np.random.default_rng(0)).tolist() == []
