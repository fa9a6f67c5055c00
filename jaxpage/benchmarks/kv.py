"""``python -m jaxpage.benchmarks.kv``: what paging, caching, swapping and sharing do for a trace, without a device.

Examples:
    python -m jaxpage.benchmarks.kv --trace AzureLLMInferenceTrace_conv.csv --block-size 8 16 32 64 128
    python -m jaxpage.benchmarks.kv --trace conversation_trace.jsonl --one-at-a-time --kv-tokens unlimited
    python -m jaxpage.benchmarks.kv --sharing
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpage.benchmarks import report, sharing
from jaxpage.benchmarks.fake_model import StepTime
from jaxpage.benchmarks.replay import Replay, Result, Settings
from jaxpage.benchmarks.traces import IdealHits, TraceRow, ideal_hits, read_trace
from jaxpage.config import PREEMPTION_MODES, SCHEDULING_POLICIES

DEFAULT_KV_TOKENS = 400_000
"""At 128 KiB a token some 50 GB: what an 80 GB chip has left beside 16 GB of weights and working memory."""


def main(argv: list[str] | None = None) -> None:
    """Replays and prints; one column for each block size and pool size."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.sharing == (options.trace is not None):
        parser.error("give either --trace or --sharing")
    if options.n > 1 and options.beam_width:
        parser.error("--n and --beam-width exclude each other")
    if options.sharing:
        rows = sharing.measure_all(options.block_size[0])
        print(report.table(rows))
        report.write(options.json, "sharing", rows, block_size=options.block_size[0], prompts=sharing.NUM_PROMPTS)
        return
    try:
        rows = replay_all(options)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(report.table(transposed(rows)))
    for name, value in report.machine().items():
        print(f"{name}: {value}")
    settings = {name: value for name, value in vars(options).items() if name not in ("json", "sharing", "trace")}
    report.write(options.json, "kv", rows, trace=Path(options.trace).name, **settings)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, step = parser.add_argument, StepTime()
    add("--trace", help="Azure CSV, Mooncake JSON lines, or JSON lines with arrival_s, prompt_tokens, output_tokens")
    add(
        "--sharing",
        action="store_true",
        help="instead of a trace: memory saved by samples and beams of one prompt, beside the paper's",
    )
    add("--limit", type=_positive, help="rows to read")
    add("--time-scale", type=float, default=1.0, help="factor on the gaps between arrivals")
    add("--one-at-a-time", action="store_true", help="each request waits for the end of the one before")
    add("--block-size", type=_positive, nargs="+", default=[16], help="tokens in a block, one or more")
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--num-blocks", "--cache-blocks", type=_positive, nargs="+", help="blocks of the pool, one or more"
    )
    size.add_argument(
        "--kv-tokens", type=_kv_tokens, nargs="+",
        help=f'tokens the pool holds, one or more, or "unlimited"; default {DEFAULT_KV_TOKENS}',
    )  # fmt: skip
    add("--max-model-len", type=_positive, help="default: the longest prompt and output of the trace")
    add("--max-num-seqs", type=_positive, default=256, help="requests in one step")
    add("--max-num-batched-tokens", type=_positive, default=2048, help="tokens in one step")
    add("--no-prefix-caching", action="store_true", help="find no prefixes")
    add("--swap-blocks", type=_count, default=0, help="blocks of the host pool that preempted requests go to")
    add("--preemption-mode", choices=PREEMPTION_MODES, default="auto", help="auto: what costs less")
    add("--policy", choices=SCHEDULING_POLICIES, default="fcfs", help="all requests have the same priority here")
    add("--n", type=_positive, default=1, help="samples of each prompt")
    add("--beam-width", type=_count, default=0, help="beams for each prompt instead of samples")
    add("--step-base-ms", type=float, default=step.base_s * 1e3, help="virtual time of a step without tokens")
    add("--step-us-per-token", type=float, default=step.s_per_token * 1e6, help="virtual time of each of its tokens")
    add("--swap-us-per-token", type=float, default=step.swap_s_per_token * 1e6, help="and of each slot swapped")
    add("--json", help="file for the result")
    return parser


def _positive(text: str) -> int:
    return _whole(text, 1)


def _count(text: str) -> int:
    return _whole(text, 0)


def _whole(text: str, low: int) -> int:
    value = int(text)
    if value < low:
        raise argparse.ArgumentTypeError(f"must be at least {low}, got {value}")
    return value


def _kv_tokens(text: str) -> int:
    return 0 if text == "unlimited" else _positive(text)


def replay_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One replay for each block size and pool size.

    Raises:
        ValueError: the trace is empty or unreadable.
    """
    trace = read_trace(options.trace, options.limit, options.time_scale)
    if not trace:
        raise ValueError(f"trace: {options.trace} holds no requests")
    longest = max(row.num_prompt_tokens + row.num_output_tokens for row in trace)
    step_time = StepTime(options.step_base_ms / 1e3, options.step_us_per_token / 1e6, options.swap_us_per_token / 1e6)
    ideal, rows = ideal_hits(trace), []
    for block_size in options.block_size:
        for num_blocks in _pool_sizes(options, trace, block_size):
            settings = Settings(
                block_size=block_size,
                num_blocks=num_blocks,
                max_model_len=options.max_model_len or longest,
                max_num_seqs=options.max_num_seqs,
                max_num_batched_tokens=options.max_num_batched_tokens,
                enable_prefix_caching=not options.no_prefix_caching,
                num_host_blocks=options.swap_blocks,
                preemption_mode=options.preemption_mode,
                policy=options.policy,
                n=options.n,
                beam_width=options.beam_width,
                one_at_a_time=options.one_at_a_time,
                step_time=step_time,
            )
            rows.append(row_of(settings, Replay(settings).run(trace), ideal))
    return rows


def _pool_sizes(options: argparse.Namespace, trace: Sequence[TraceRow], block_size: int) -> list[int]:
    if options.num_blocks:
        return options.num_blocks
    width = max(options.n, options.beam_width)
    # No more than this is ever written: each prompt and all it gives, its last block half empty.
    everything = sum(
        -(-(row.num_prompt_tokens + width * (row.num_output_tokens + block_size)) // block_size) + 1 for row in trace
    )
    return [
        max(1, tokens // block_size) if tokens else everything for tokens in options.kv_tokens or [DEFAULT_KV_TOKENS]
    ]


def row_of(settings: Settings, result: Result, ideal: IdealHits | None) -> dict[str, Any]:
    """A result under the names of the table. Shares are percentages."""
    counters, stats, shares = result.counters, result.stats, result.shares
    queried = max(1, counters.num_queried_tokens)
    row: dict[str, Any] = {
        "block size": settings.block_size,
        "blocks": settings.num_blocks,
        "requests ended": stats.num_finished,
        "refused": result.num_refused,
        "cut short": result.num_cut,
        "steps": result.num_steps,
        "virtual s": result.duration_s,
        "generated tokens": stats.num_generated_tokens,
        "peak running": result.peak_running,
        "pool used %": 100 * shares.used,
        "waste %": 100 * shares.waste,
        "waste, max_model_len reserved %": 100 * shares.waste_max,
        "waste, power of two reserved %": 100 * shares.waste_pow2,
        "waste, final length reserved %": 100 * shares.waste_exact,
        "saved by sharing %": 100 * shares.saved,
        "queried tokens": counters.num_queried_tokens,
        "hit tokens": counters.num_hit_tokens,
        "hit tokens in full blocks": counters.num_full_block_hit_tokens,
        "hit %": 100 * counters.num_hit_tokens / queried,
        "hit in full blocks %": 100 * counters.num_full_block_hit_tokens / queried,
    }
    if ideal is not None:
        row["ideal hit %"] = 100 * ideal.num_tokens / ideal.num_prompt_tokens
        row["ideal hit in 512-token blocks %"] = 100 * ideal.num_full_block_tokens / ideal.num_prompt_tokens
        row["ideal hit tokens"] = ideal.num_tokens
        row["ideal hit tokens in 512-token blocks"] = ideal.num_full_block_tokens
    row |= {
        "preempted by swap": stats.num_swap_preemptions,
        "preempted by recompute": stats.num_recompute_preemptions,
        "blocks swapped out": counters.num_swapped_out_blocks,
        "blocks swapped in": counters.num_swapped_in_blocks,
        "blocks copied": counters.num_copied_blocks,
    }
    for name, values in (
        ("queue s", result.delays_s),
        ("queue steps", result.delays_steps),
        ("first token s", result.first_token_s),
    ):
        row |= {f"{name} {label}": value for label, value in percentiles(values).items()}
    row["block table max"] = result.table_max
    row["block table mean"] = result.table_mean
    row["host us a request a step"] = 1e6 * result.host_s / max(1, result.num_scheduled)
    row["host us a step"] = 1e6 * result.host_s / max(1, result.num_steps)
    return row


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90, p99 and max; zeros if there are no values."""
    ordered = sorted(values) or [0]
    last = len(ordered) - 1
    return {**{f"p{share}": ordered[last * share // 100] for share in (50, 90, 99)}, "max": ordered[last]}


def transposed(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line for each figure, one column for each replay: there are more figures than a line has room for."""
    return [{"": name, **{str(place): row[name] for place, row in enumerate(rows, start=1)}} for name in rows[0]]


if __name__ == "__main__":
    main()
