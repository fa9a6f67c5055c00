"""``jaxpage bench throughput | latency`` with a data set: the same requests as over HTTP, with an engine in process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from numpy_reference import RandomModel

from jaxpage import LLM
from jaxpage.benchmarks import latency, offline, throughput
from jaxpage.benchmarks.serving.datasets import Sample

SMALL = ["--max-model-len", "128", "--max-num-seqs", "8", "--max-num-batched-tokens", "16", "--block-size", "4"]
SMALL += ["--num-gpu-blocks-override", "128", "--enforce-eager"]
RANDOM = ["--dataset-name", "random", "--input-len", "6", "--output-len", "4"]


def test_every_token_is_counted_and_timed(
    random_model: Callable[..., RandomModel], llm_for: Callable[..., LLM], random_ids: Callable[..., list[int]]
) -> None:
    engine = llm_for(random_model().directory).engine
    samples = [Sample(random_ids(5 + index, seed=index), 5 + index, 3 + index) for index in range(5)]
    result = offline.run_in_batches(engine, samples, batch_size=2)
    assert (result["completed"], result["failed"]) == (5, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (5 + 6 + 7 + 8 + 9, 3 + 4 + 5 + 6 + 7)
    assert result["peak_concurrent_requests"] == 2
    assert 0 < result["p50_ttft_ms"] < result["p50_e2el_ms"] <= result["duration"] * 1000
    assert not engine.has_work


@pytest.mark.parametrize("module", [throughput, latency])
def test_commands(
    module: Any, random_model: Callable[..., RandomModel], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "r.json"
    model = ["--model", str(random_model().directory), *SMALL]
    assert module.main([*model, *RANDOM, "--num-prompts", "3", "--json", str(file)]) == 0
    [row] = json.loads(file.read_text())["rows"]
    assert (row["completed"], row["total_output_tokens"]) == (3, 12)
    assert row["peak_concurrent_requests"] == (3 if module is throughput else 1)
    assert "time to first token (TTFT)" in capsys.readouterr().out


def test_what_does_not_fit_is_said(
    random_model: Callable[..., RandomModel], llm_for: Callable[..., LLM], capsys: pytest.CaptureFixture[str]
) -> None:
    engine = llm_for(random_model().directory).engine
    options = throughput.parse([*RANDOM, "--random-range-ratio", "0.5", "--num-prompts", "40"], "bench")
    options.random_input_len = 120
    fitting = offline.fitting_samples(options, engine)
    assert 0 < len(fitting) < 40
    assert all(sample.num_prompt_tokens + sample.num_output_tokens < 128 for sample in fitting)
    options.random_input_len = 1000
    with pytest.raises(ValueError, match="no request of the data set fits into max_model_len 128"):
        offline.fitting_samples(options, engine)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--dataset-name", "sonnet"], "--dataset-path: is needed for --dataset-name sonnet"),
        (["--max-model-len", "0"], "--max-model-len: must be at least 1, got 0"),
    ],
)
def test_errors_are_one_line(
    argv: list[str],
    message: str,
    random_model: Callable[..., RandomModel],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert throughput.main(["--model", str(random_model().directory), *SMALL, *argv]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"jaxpage: error: {message}"


def test_data_sets_have_no_peers() -> None:
    with pytest.raises(SystemExit):
        throughput.main([*RANDOM, "--peer", "vllm", "--peer-python", "python"])
