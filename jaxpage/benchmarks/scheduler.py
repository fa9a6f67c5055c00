"""``python -m jaxpage.benchmarks.scheduler``: what a step costs the host, beside vLLM's scheduler if asked.

Steady decode: all requests are running and each step gives each one token. Measured is ``schedule()`` + ``update()`` in
the order of the engine, the next step scheduled before the last one is taken in. Example:
    python -m jaxpage.benchmarks.scheduler --peer-python VENV/bin/python
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from typing import Any

from jaxpage.benchmarks import report, scheduler_peer
from jaxpage.kv.manager import KVCacheManager
from jaxpage.params import SamplingParams
from jaxpage.request import Request
from jaxpage.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
WARM_UP = 30
STEPS = 208  # a multiple of the block size: each round has equally many new blocks
ROUNDS = 3
MAX_TOKENS = 4096

# Requests, prompt tokens, blocks, prefix caching. The first two are vLLM's set-up, the others show what matters.
CASES = (
    (64, 512, 60_000, True),
    (256, 512, 60_000, True),
    (64, 512, 60_000, False),
    (256, 512, 60_000, False),
    (64, 512, 5_000, True),
    (64, 512, 500_000, True),
    (64, 4_096, 500_000, True),
    (64, 32_768, 500_000, True),
)


def main(argv: list[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help="steps in a round")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of each case; the best one counts")
    parser.add_argument("--peer-python", help="interpreter of an environment that has vLLM")
    parser.add_argument("--json", help="file for the result")
    options = parser.parse_args(argv)
    if options.steps < 1 or options.rounds < 1 or WARM_UP + options.steps * options.rounds > MAX_TOKENS - 8:
        parser.error(
            f"--steps, --rounds: must be at least 1, and all steps together at most {MAX_TOKENS - 8 - WARM_UP}"
        )
    jobs = [job_of(case, options.steps, options.rounds) for case in CASES]
    rows = [row_of(job, measure(job)) for job in jobs]
    settings: dict[str, Any] = {"steps": options.steps, "rounds": options.rounds, "block_size": BLOCK_SIZE}
    if options.peer_python:
        peer = scheduler_peer.measure(options.peer_python, jobs)
        settings["vllm"] = peer["version"]
        for row, figure in zip(rows, peer["us"], strict=True):
            row |= {"vllm us": figure, "vllm/jaxpage": figure / row["jaxpage us"]}
    print("us a request a step:")
    print(report.table(rows))
    for name, value in report.machine().items():
        print(f"{name}: {value}")
    report.write(options.json, "scheduler", rows, **settings)


def job_of(case: tuple[int, int, int, bool], steps: int, rounds: int) -> dict[str, Any]:
    """A case as plain data, the same for jaxpage and for its peer."""
    num_requests, num_prompt_tokens, num_blocks, caching = case
    return {
        "num_requests": num_requests,
        "num_prompt_tokens": num_prompt_tokens,
        "num_blocks": num_blocks,
        "block_size": BLOCK_SIZE,
        "caching": caching,
        "warm_up": WARM_UP,
        "steps": steps,
        "rounds": rounds,
    }


def row_of(job: dict[str, Any], us: float) -> dict[str, Any]:
    """A figure under the names of the table."""
    return {
        "requests": job["num_requests"],
        "prompt tokens": job["num_prompt_tokens"],
        "blocks": job["num_blocks"],
        "prefix caching": "on" if job["caching"] else "off",
        "jaxpage us": us,
    }


def measure(job: dict[str, Any]) -> float:
    """jaxpage's microseconds a request a step."""
    step = decoding(job)
    gc.collect()  # the garbage of the prompts is no cost of a step
    return scheduler_peer.best_of(job["rounds"], job["steps"], job["warm_up"], step)


def decoding(job: dict[str, Any]) -> Callable[[], int]:
    """A scheduler with all requests in decode; the function makes one step and says how many requests it served.

    Raises:
        ValueError: the pool does not hold the requests.
    """
    num_requests, num_prompt_tokens = job["num_requests"], job["num_prompt_tokens"]
    num_tokens = num_prompt_tokens + job["warm_up"] + job["steps"] * job["rounds"]
    if num_requests * (num_tokens // job["block_size"] + 2) > job["num_blocks"]:
        raise ValueError(f"num_blocks: {job['num_blocks']} do not hold {num_requests} requests of {num_tokens} tokens")
    scheduler = Scheduler(
        KVCacheManager(job["num_blocks"], job["block_size"], job["caching"]),
        max_num_seqs=num_requests,
        max_num_batched_tokens=8192,
        max_model_len=num_prompt_tokens + MAX_TOKENS,
        enable_chunked_prefill=True,
    )
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    requests = [Request(str(index), [index] * num_prompt_tokens, params, MAX_TOKENS) for index in range(num_requests)]
    for request in requests:
        scheduler.add(request)
    in_flight = scheduler.schedule()

    def step() -> int:
        nonlocal in_flight
        before, in_flight = in_flight, scheduler.schedule()
        scheduler.update(before, [7] * len(before.requests))
        return len(in_flight.requests)

    while any(request.num_known_output_tokens == 0 for request in requests):
        step()
    return step


if __name__ == "__main__":
    main()
