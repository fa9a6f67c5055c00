"""``python -m jaxpage.benchmarks.prefix_cache``: what the prefix cache gives on a hit and costs without one.

A hit: time to first token of a prompt that was seen before, against the first time. No hit: the same requests, none of
which share anything, served by an engine with the cache on and one with it off, turn by turn in one process.
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
    parser.add_argument("--rounds", type=int, default=7, help="turns of each engine; medians are compared")
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
    """Output tokens a second without any hit, and the median over rounds of their ratio."""
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for round_ in range(rounds + 1):
        order = list(engines.items())
        for name, engine in order if round_ % 2 else reversed(order):  # neither engine is always the first
            rates[name].append(rate(engine, round_))
    ratios = [on / off for on, off in zip(rates["on"][1:], rates["off"][1:], strict=True)]  # the first round warms up
    return {
        "requests": NUM_REQUESTS,
        "cache on tok/s": statistics.median(rates["on"][1:]),
        "cache off tok/s": statistics.median(rates["off"][1:]),
        "on / off": f"{statistics.median(ratios):.4f}",
        "from": f"{min(ratios):.4f}",
        "to": f"{max(ratios):.4f}",
    }


def rate(engine: Engine, round_: int) -> float:
    """Output tokens a second of a batch of requests that share nothing with one another or with earlier rounds."""
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    started = time.perf_counter()
    for index in range(NUM_REQUESTS):
        prompt = long_prompt(PROMPT_TOKENS, engine.model.vocab_size, seed=1 + round_ * NUM_REQUESTS + index + 1000)
        engine.add(f"rate-{index}", prompt, params)
    while engine.has_work:
        engine.step()
    return NUM_REQUESTS * NEW_TOKENS / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
