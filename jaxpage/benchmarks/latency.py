"""``python -m jaxpage.benchmarks.latency``: time to first token by prompt length, cold and on a prefix hit, and
the time between tokens of one stream; or, with --dataset-name, those of a data set's requests, a few at a time.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxpage.benchmarks import report
from jaxpage.benchmarks.serving.options import add_dataset_flags, whole
from jaxpage.benchmarks.workloads import long_prompt
from jaxpage.config import EngineArgs
from jaxpage.config_file import add_config_flag, expand_config
from jaxpage.console import fail
from jaxpage.errors import StartupError
from jaxpage.params import RequestOutputKind, SamplingParams
from jaxpage.request import RequestOutput

if TYPE_CHECKING:
    from jaxpage.engine.front import Engine

PROMPT_LENGTHS = (16, 128, 512, 2000)
DECODE_TOKENS = 64


def main(argv: Sequence[str] | None = None, prog: str = "python -m jaxpage.benchmarks.latency") -> int:
    """Measures and prints; returns 0, or 1 if the engine cannot run what is asked for."""
    options = parse(argv, prog)
    try:
        if options.json:
            report.check_result_file("json", options.json)
        if options.dataset_name is None:
            by_prompt_length(options)
        else:
            from jaxpage.benchmarks.offline import measure_dataset

            measure_dataset(options, options.batch_size)
    except (ValueError, OSError, StartupError) as error:
        return fail(error, options)
    return 0


def parse(argv: Sequence[str] | None, prog: str) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog=prog, usage="%(prog)s [options]", description=__doc__)
    add_config_flag(parser)
    parser.add_argument("--prompt-length", type=whole(1), action="append", help=f"repeatable; default {PROMPT_LENGTHS}")
    parser.add_argument("--repeats", type=whole(1), default=3, help="runs per figure; the median is shown")
    parser.add_argument("--json", "--output-json", metavar="FILE", help="file for the result")
    parser.add_argument("--batch-size", type=whole(1), default=1, metavar="N", help="of a data set (default: 1)")
    add_dataset_flags(parser, default=None, num_prompts=20, is_offline=True)
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(max_model_len=2304)
    options = parser.parse_args(expand_config(parser, argv))
    if options.dataset_path and not options.dataset_name:
        parser.error("--dataset-path needs --dataset-name")
    return options


def by_prompt_length(options: argparse.Namespace) -> None:
    """Made-up prompts of several lengths, each cold and again."""
    from jaxpage.engine.front import Engine  # late: --help needs no jax

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
            assert isinstance(output, RequestOutput), "only generation was asked for"
            times += [time.perf_counter() - started] * len(output.outputs[0].token_ids)
    return times


if __name__ == "__main__":
    sys.exit(main())
