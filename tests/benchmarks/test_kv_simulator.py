"""The KV simulator: honest about what the scheduler does, equal to what can be computed without it, free of jax."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from golden_data import DATA

from jaxpage.benchmarks import kv, scheduler, sharing
from jaxpage.benchmarks.fake_model import FakeModel, StepTime
from jaxpage.benchmarks.replay import Replay, Result, Settings
from jaxpage.benchmarks.traces import TraceRow, ideal_hits, read_trace

AZURE = DATA / "traces" / "azure_conv_head.csv"
MOONCAKE = DATA / "traces" / "mooncake_synthetic_head.jsonl"


def run(rows: list[TraceRow], **settings: Any) -> Result:
    defaults: dict[str, Any] = {"block_size": 4, "num_blocks": 1000, "max_model_len": 4096}
    return Replay(Settings(**defaults | settings)).run(rows)


def burst(count: int, prompt: int, output: int) -> list[TraceRow]:
    return [TraceRow(0.0, prompt, output) for _ in range(count)]


def test_commands_need_no_jax() -> None:
    program = (
        "import sys\n"
        "from jaxpage.benchmarks import kv\n"
        f"kv.main(['--trace', {str(AZURE)!r}, '--limit', '5'])\n"
        "import jaxpage.benchmarks.scheduler\n"
        "assert 'jax' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "waste %" in done.stdout


# Traces.


def test_azure_rows() -> None:
    rows = read_trace(AZURE, limit=2, time_scale=0.5)
    assert rows[0] == TraceRow(0.0, 374, 44)
    assert rows[1].arrival_s == pytest.approx((50.995169 - 46.680590) / 2)
    assert (rows[1].num_prompt_tokens, rows[1].num_output_tokens) == (396, 109)


def test_simple_rows_are_sorted_by_arrival(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [
        {"arrival_s": 9, "prompt_tokens": 3, "output_tokens": 2},
        {"arrival_s": 7, "prompt_tokens": 1, "output_tokens": 1},
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert read_trace(file) == [TraceRow(0.0, 1, 1), TraceRow(2.0, 3, 2)]


@pytest.mark.parametrize(
    "line",
    [
        '{"arrival_s": 0, "prompt_tokens": 0, "output_tokens": 2}',
        '{"arrival_s": 0, "prompt_tokens": 5}',
        '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}',
        '{"timestamp": null, "input_length": 5, "output_length": 1}',
        '{"arrival_s": 0, "prompt_tokens": 5, "output_tok',
        "when,what\n1,2",
    ],
)
def test_bad_rows_name_the_record(tmp_path: Path, line: str) -> None:
    file = tmp_path / "trace"
    file.write_text(line)
    with pytest.raises(ValueError, match="record 1"):
        read_trace(file)


def test_prompts_share_what_their_blocks_share() -> None:
    one, two = TraceRow(0, 1100, 1, (5, 6, 7)), TraceRow(0, 700, 1, (5, 8))
    first, second = one.prompt_token_ids(0), two.prompt_token_ids(1)
    assert (len(first), len(second)) == (1100, 700)
    assert first[:512] == second[:512] and first[512] != second[512]
    plain = TraceRow(0, 3, 1)
    assert plain.prompt_token_ids(0)[0] != plain.prompt_token_ids(1)[0]


def test_ideal_hits_by_hand() -> None:
    rows = [
        TraceRow(0, 1024, 1, (1, 2)),
        TraceRow(0, 1024, 1, (1, 2)),  # all of it is known: the last token is computed again, so is its block
        TraceRow(0, 700, 1, (1, 3)),
        TraceRow(0, 600, 1, (1, 3)),  # 88 tokens of block 3, and one of them is computed again
        TraceRow(0, 600, 1, (4, 3)),  # a block counts only after the same blocks
    ]
    ideal = ideal_hits(rows)
    assert ideal is not None
    assert ideal.num_prompt_tokens == 3948
    assert ideal.num_full_block_tokens == 512 + 512 + 512
    assert ideal.num_tokens == 1023 + 512 + 599
    assert ideal_hits([TraceRow(0, 5, 1)]) is None


# Replays.


@pytest.mark.parametrize("block_size", [512, 16])
def test_hits_are_the_ideal_ones(block_size: int) -> None:
    """In 512-token blocks where these are the cache's, and in all at any block size."""
    rows = read_trace(MOONCAKE)
    ideal = ideal_hits(rows)
    assert ideal is not None and ideal.num_full_block_tokens < ideal.num_tokens
    rows = [
        TraceRow(row.arrival_s, row.num_prompt_tokens, min(row.num_output_tokens, 20), row.hash_ids) for row in rows
    ]
    num_blocks = sum(row.num_prompt_tokens // block_size + 3 for row in rows)
    result = run(rows, block_size=block_size, num_blocks=num_blocks, max_model_len=200_000, one_at_a_time=True)
    counters = result.counters
    assert counters.num_queried_tokens == ideal.num_prompt_tokens
    assert counters.num_hit_tokens == ideal.num_tokens
    if block_size == 512:
        assert counters.num_full_block_hit_tokens == ideal.num_full_block_tokens
    assert result.peak_running == 1


def test_paging_wastes_little_on_real_lengths() -> None:
    rows = read_trace(AZURE, 200)
    result = run(rows, block_size=16, num_blocks=25_000, max_model_len=8192)
    shares = result.shares
    assert 0 < shares.waste < 0.02
    assert 0.5 < shares.waste_max < 1
    assert shares.waste < shares.waste_exact < shares.waste_pow2 < shares.waste_max
    assert result.stats.num_finished == len(rows) == len(result.delays_s) == len(result.first_token_s)
    assert result.stats.num_generated_tokens == sum(row.num_output_tokens for row in rows)
    assert result.counters.num_hit_tokens == 0


def test_waste_by_hand() -> None:
    """One request of 5 tokens computed at once, then 3 steps of one more, in blocks of 4 and steps of equal length."""
    result = run(burst(1, 5, 4), step_time=StepTime(1.0, 0.0, 0.0), max_model_len=16)
    assert result.shares.waste == pytest.approx((3 / 8 + 2 / 8 + 1 / 8 + 0) / 4)
    assert result.shares.waste_max == pytest.approx((11 + 10 + 9 + 8) / 16 / 4)
    assert result.shares.waste_exact == pytest.approx((4 + 3 + 2 + 1) / 9 / 4)
    assert result.shares.waste_pow2 == result.shares.waste_exact  # 4 is a power of two
    assert (result.num_steps, result.duration_s, result.table_max) == (4, 4.0, 2)
    assert result.first_token_s == [1.0]


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_small_pool_preempts(mode: str) -> None:
    rows = burst(12, 20, 30)
    result = run(rows, num_blocks=30, num_host_blocks=200, preemption_mode=mode, enable_prefix_caching=False)
    stats, counters = result.stats, result.counters
    assert stats.num_finished == 12 and result.num_cut == 0
    assert stats.num_generated_tokens == 12 * 30
    assert (stats.num_swap_preemptions > 0, stats.num_recompute_preemptions > 0) == (mode == "swap", mode != "swap")
    assert counters.num_swapped_in_blocks == counters.num_swapped_out_blocks
    assert (counters.num_swapped_out_blocks > 0) == (mode == "swap")


def test_rows_that_never_fit_are_refused_and_rows_that_grow_too_long_are_cut() -> None:
    rows = [TraceRow(0, 50, 4), TraceRow(5, 30, 4), TraceRow(9, 8, 100), TraceRow(9, 8, 4)]
    result = run(rows, num_blocks=10, max_model_len=45)
    assert (result.num_refused, result.num_cut) == (1, 1)
    assert result.stats.num_finished == 3
    assert result.stats.num_generated_tokens == 4 + (10 * 4 - 8 + 1) + 4  # the last token needs no slot


def test_a_burst_queues_in_order_of_arrival() -> None:
    result = run(burst(40, 16, 4), max_num_seqs=4, enable_prefix_caching=False)
    assert result.peak_running == 4
    assert result.delays_steps == sorted(result.delays_steps)
    assert result.delays_steps[0] == 0 < result.delays_steps[-1]


def test_samples_and_beams_share_blocks() -> None:
    rows = burst(3, 33, 40)
    samples = run(rows, n=4, enable_prefix_caching=False)
    assert samples.stats.num_generated_tokens == 3 * 4 * 40
    assert samples.counters.num_copied_blocks == 3 * 3  # the last to write keeps the block
    beams = run(rows, beam_width=4, enable_prefix_caching=False)
    assert 0.2 < samples.shares.saved < beams.shares.saved < 0.75
    assert beams.stats.num_finished == 3


def test_fake_candidates_are_probabilities() -> None:
    model = FakeModel()
    for _ in range(100):
        pairs = model.candidates(12)
        logprobs = [logprob for _, logprob in pairs]
        assert len({token_id for token_id, _ in pairs}) == 12
        assert logprobs == sorted(logprobs, reverse=True) and logprobs[0] <= 0


def test_sharing_grows_with_the_width() -> None:
    for kind in ("samples", "beams"):
        shares = [sharing.saved("Alpaca", kind, width, 16, 12) for width in sharing.WIDTHS]
        assert shares == sorted(shares) and shares[0] > 0


# Commands.


def test_one_column_for_each_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    sizes = ["--block-size", "8", "32", "--cache-blocks", "500", "2000"]
    kv.main(["--trace", str(MOONCAKE), "--limit", "4", "--max-model-len", "20000", "--json", str(file), *sizes])
    content = json.loads(file.read_text())
    assert [(row["block size"], row["blocks"]) for row in content["rows"]] == [
        (8, 500),
        (8, 2000),
        (32, 500),
        (32, 2000),
    ]
    assert content["settings"]["trace"] == MOONCAKE.name
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("ideal hit %", "queue steps p99", "block table max"))


@pytest.mark.parametrize(
    "arguments",
    [[], ["--sharing", "--trace", "x"], ["--trace", "missing.csv"], ["--trace", str(AZURE), "--block-size", "0"],
     ["--trace", str(AZURE), "--n", "2", "--beam-width", "2"]],
)  # fmt: skip
def test_bad_options_end_with_a_message(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        kv.main(arguments)
    assert stopped.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_percentiles() -> None:
    assert kv.percentiles(range(100)) == {"p50": 49, "p90": 89, "p99": 98, "max": 99}
    assert kv.percentiles([]) == {"p50": 0, "p90": 0, "p99": 0, "max": 0}


def test_host_cost_is_measured_in_steady_decode() -> None:
    job = scheduler.job_of((3, 20, 100, True), steps=16, rounds=1)
    step = scheduler.decoding(job)
    assert [step() for _ in range(40)] == [3] * 40
    assert 0 < scheduler.measure(job) < 10_000
    with pytest.raises(ValueError, match="num_blocks"):
        scheduler.measure(job | {"num_blocks": 10})
