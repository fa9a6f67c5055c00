"""``python -m jaxpage.benchmarks.latency``: time to first token by prompt length, cold and on a prefix hit, and
the time between tokens of one stream.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from typing import Any

from jaxpage import EngineArgs, SamplingParams
from jaxpage.benchmarks import report
from jaxpage.benchmarks.workloads import long_prompt
from jaxpage.engine.front import Engine
from jaxpage.request import RequestOutputKind

PROMPT_LENGTHS = (16, 128, 512, 2000)
DECODE_TOKENS = 64


def main(argv: list[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt-length", type=int, action="append", help=f"repeatable; default {PROMPT_LENGTHS}")
    parser.add_argument("--repeats", type=int, default=3, help="runs per figure; the median is shown")
    parser.add_argument("--json", help="file for the result")
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(max_model_len=2304)
    options = parser.parse_args(argv)
    args = EngineArgs.from_cli_args(options)
    engine = Engine(args)
    rows = [measure(engine, length, options.repeats) for length in options.prompt_length or PROMPT_LENGTHS]
    print(report.table(rows))
    for name, value in report.machine().items():
        print(f"{name}: {value}")
    report.write(options.json, "latency", rows, model=args.model, decode_tokens=DECODE_TOKENS)


def measure(engine: Engine, length: int, repeats: int) -> dict[str, Any]:
    """Milliseconds for prompts of ``length`` tokens: first token cold and again, then the median and worst gap."""
    cold, hit, gaps = [], [], []
    for repeat in range(repeats):
        prompt = long_prompt(length, engine.model.vocab_size, seed=length * 1000 + repeat)
        cold.append(token_times(engine, prompt, 1)[0])
        times = token_times(engine, prompt, DECODE_TOKENS)
        hit.append(times[0])
        gaps += [after - before for before, after in itertools.pairwise(times)]
    return {
        "prompt tokens": length,
        "first token cold ms": 1e3 * statistics.median(cold),
        "first token hit ms": 1e3 * statistics.median(hit),
        "between tokens p50 ms": 1e3 * statistics.median(gaps),
        "between tokens p99 ms": 1e3 * sorted(gaps)[int(0.99 * (len(gaps) - 1))],
    }


def token_times(engine: Engine, prompt: list[int], count: int) -> list[float]:
    """Seconds from the request to each of its tokens."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    started = time.perf_counter()
    engine.add("latency", prompt, params)
    times = []
    while engine.has_work:
        for output in engine.step():
            times += [time.perf_counter() - started] * len(output.outputs[0].token_ids)
    return times


if __name__ == "__main__":
    main()
