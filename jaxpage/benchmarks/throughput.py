"""``python -m jaxpage.benchmarks.throughput``: greedy decode tokens per second by batch size, beside peers if asked;
or, with --dataset-name, those of a data set whose requests are all there at once.

Peers run the model's float32 numbers from a directory that is written for them, as jaxpage does in a row of its own.

Example, with an environment that has torch and transformers or vLLM:
    python -m jaxpage.benchmarks.throughput --peer transformers --peer vllm --peer-python VENV/bin/python
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpage.benchmarks import peers, report
from jaxpage.benchmarks.serving.options import add_dataset_flags, whole
from jaxpage.benchmarks.workloads import BATCH_SIZES, NEW_TOKENS, decode_prompts
from jaxpage.config import EngineArgs
from jaxpage.config_file import add_config_flag, expand_config
from jaxpage.console import fail
from jaxpage.errors import StartupError
from jaxpage.params import SamplingParams


def main(argv: Sequence[str] | None = None, prog: str = "python -m jaxpage.benchmarks.throughput") -> int:
    """Measures and prints; returns 0, or 1 if the engine cannot run what is asked for."""
    options = parse(argv, prog)
    try:
        if options.json:
            report.check_result_file("json", options.json)
        if options.dataset_name is None:
            compare(options)
        else:
            from jaxpage.benchmarks.offline import measure_dataset

            measure_dataset(options, batch_size=None)
    except (ValueError, OSError, StartupError) as error:
        return fail(error, options)
    return 0


def parse(argv: Sequence[str] | None, prog: str) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_config_flag(parser)
    parser.add_argument(
        "--batch", type=whole(1), action="append", help=f"batch size, repeatable; default {BATCH_SIZES}"
    )
    parser.add_argument("--new-tokens", type=whole(1), default=NEW_TOKENS, help="tokens generated per request")
    parser.add_argument(
        "--peer", choices=peers.PEERS, action="append", default=[], help="engine to run beside, repeatable"
    )
    parser.add_argument("--peer-python", help="interpreter of the environment that has the peers")
    parser.add_argument("--json", "--output-json", metavar="FILE", help="file for the result")
    add_dataset_flags(parser, default=None, num_prompts=100, is_offline=True)
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(max_model_len=2048)
    options = parser.parse_args(expand_config(parser, argv))
    if options.dataset_path and not options.dataset_name:
        parser.error("--dataset-path needs --dataset-name")
    if options.dataset_name and (options.peer or options.batch):
        parser.error("--batch and --peer are not for data sets")
    if options.peer and not options.peer_python:
        parser.error("--peer needs --peer-python")
    if options.peer_python and shutil.which(options.peer_python) is None:
        parser.error(f"argument --peer-python: no such interpreter: {options.peer_python[:200]!r}")
    return options


def compare(options: argparse.Namespace) -> None:
    """Batch sizes, beside peers."""
    batches: list[int] = options.batch or list(BATCH_SIZES)
    args = EngineArgs.from_cli_args(options)

    results = {"jaxpage": measure(args, batches, options.new_tokens)}
    with tempfile.TemporaryDirectory() as directory:
        if options.peer:
            peers.export(args.model, Path(directory), args.revision)
            # Peers get plain float32 weights, whose bytes bound small batches; the model's own file may be smaller.
            results["jaxpage, peers' files"] = measure(
                dataclasses.replace(args, model=directory, revision=None), batches, options.new_tokens
            )
        for peer in options.peer:
            results[peer] = peers.measure(
                peer, options.peer_python, Path(directory), decode_prompts(max(batches)), batches, options.new_tokens
            )
    rows = _rows(results, batches)
    print(report.table(rows))
    for name, value in report.machine().items():
        print(f"{name}: {value}")
    report.write(options.json, "throughput", rows, model=args.model, new_tokens=options.new_tokens)


def measure(args: EngineArgs, batches: list[int], new_tokens: int) -> dict[str, Any]:
    """jaxpage's tokens per second by batch size: the better of two runs, after one run to warm up."""
    from jaxpage import LLM  # late: --help needs no jax

    started = time.perf_counter()
    llm = LLM(**vars(args))
    result: dict[str, Any] = {"ready_s": time.perf_counter() - started, "tokens_per_s": {}}
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    llm.generate(decode_prompts(1), params, use_tqdm=False)
    for batch in batches:
        rates = []
        for repeat in range(2):
            # Other prompts each time, so that no prefix cache helps.
            prompts = [f"{batch}.{repeat} {prompt}" for prompt in decode_prompts(batch)]
            begun = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            rates.append(batch * new_tokens / (time.perf_counter() - begun))
        result["tokens_per_s"][str(batch)] = max(rates)
    return result


def _rows(results: dict[str, dict[str, Any]], batches: list[int]) -> list[dict[str, Any]]:
    ours = results["jaxpage"]["tokens_per_s"]
    rows = []
    for name, result in results.items():
        row: dict[str, Any] = {"engine": name, "start to ready s": result["ready_s"]}
        for batch in batches:
            rate = result["tokens_per_s"][str(batch)]
            row[f"batch {batch} tok/s"] = rate
            row[f"jaxpage/x at {batch}"] = ours[str(batch)] / rate
        rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
