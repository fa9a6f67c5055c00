"""``python -m jaxpage.benchmarks.prefix_cache``: what the prefix cache gives on a hit and costs without one.

A hit: time to first token of a prompt that was seen before, against the first time. No hit: the same requests, none of
which share anything, served by an engine with the cache on and one with it off, step by step in turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from jaxpage import EngineArgs, SamplingParams
from jaxpage.benchmarks import report
from jaxpage.benchmarks.latency import token_times
from jaxpage.benchmarks.workloads import long_prompt
from jaxpage.engine.front import Engine

HIT_PROMPT_TOKENS = 2000
NUM_REQUESTS = 16
PROMPT_TOKENS, NEW_TOKENS = 100, 64


def main(argv: list[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="times that the requests are served")
    parser.add_argument("--json", help="file for the result")
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(max_model_len=2304)
    options = parser.parse_args(argv)
    engines = {}
    for name, enabled in (("on", True), ("off", False)):
        options.enable_prefix_caching = enabled
        engines[name] = Engine(EngineArgs.from_cli_args(options))
    rows = [hit_row(engines["on"]), cost_row(engines, options.rounds)]
    for row in rows:
        print(report.table([row]))
    report.write(options.json, "prefix_cache", rows, model=options.model, rounds=options.rounds)


def hit_row(engine: Engine) -> dict[str, Any]:
    """Milliseconds to the first token of a long prompt, cold and on a full hit."""
    cold, hit = [], []
    for repeat in range(3):
        prompt = long_prompt(HIT_PROMPT_TOKENS, engine.model.vocab_size, seed=repeat)
        cold.append(token_times(engine, prompt, 1)[0])
        hit.append(token_times(engine, prompt, 1)[0])
    before, after = statistics.median(cold), statistics.median(hit)
    return {
        "prompt tokens": HIT_PROMPT_TOKENS,
        "cold ms": 1e3 * before,
        "hit ms": 1e3 * after,
        "saved": f"{1 - after / before:.1%}",
    }


def cost_row(engines: dict[str, Engine], rounds: int) -> dict[str, Any]:
    """Milliseconds a step without any hit, and how much longer a step takes with the cache on: the median over steps.

    Both engines take the same steps in turn, each timed until the device is done, so that a machine that is slower for
    a while is so for both. The next step is not prepared meanwhile: what the host does counts in full.
    """
    steps = [pair for round_ in range(rounds + 1) for pair in paired_steps(engines, round_) if round_]
    ratios = sorted(on / off for on, off in steps)
    return {
        "requests": NUM_REQUESTS,
        "steps": len(steps),
        "cache on ms": 1e3 * statistics.median(on for on, _ in steps),
        "cache off ms": 1e3 * statistics.median(off for _, off in steps),
        "throughput on / off": f"{1 / statistics.median(ratios):.4f}",
        "middle half of steps": f"{1 / ratios[len(ratios) * 3 // 4]:.3f} to {1 / ratios[len(ratios) // 4]:.3f}",
    }


def paired_steps(engines: dict[str, Engine], round_: int) -> list[tuple[float, float]]:
    """Seconds of each step (on, off) for requests that share nothing with one another or with earlier rounds."""
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for index in range(NUM_REQUESTS):
        for engine in engines.values():
            prompt = long_prompt(PROMPT_TOKENS, engine.model.vocab_size, seed=1000 + round_ * NUM_REQUESTS + index)
            engine.add(f"cost-{index}", prompt, params)
    pairs = []
    order = list(engines)
    while any(engine.has_work for engine in engines.values()):
        seconds = {}
        for name in order:
            started = time.perf_counter()
            engines[name].step()
            engines[name].core.runner.wait()
            seconds[name] = time.perf_counter() - started
        pairs.append((seconds["on"], seconds["off"]))
        order.reverse()  # neither is always the first
    return pairs


if __name__ == "__main__":
    main()
