"""A program: generates on several devices or processes, and prints what came. Not a test itself.

Usage: python many_devices.py MODEL OPTIONS [PROMPTS], where OPTIONS is a JSON array of objects of engine options: there
is a line of output for each. With a process_id above 0 it follows, and prints nothing. PROMPTS is a JSON array of
texts; without it they are random ids, for a tiny model. See device_runs.py, which runs it.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import os
import sys
import time
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

from jaxpage import LLM, RequestOutput, SamplingParams
from jaxpage.config import EngineArgs
from jaxpage.engine.build import follow_leader, join_hosts
from jaxpage.runner.commands import Command
from jaxpage.runner.pipeline import Results
from jaxpage.runner.worker import Worker

SIZES: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 16, "block_size": 4}
SIZES |= {"num_gpu_blocks_override": 24, "enforce_eager": True, "dtype": "float32"}
NUM_TOKENS = 16
"""Tokens to generate for each prompt."""
ENDLESS = "ENDLESS"
"""Variable that makes the leader generate until it is killed."""
ASTRAY = "GO_ASTRAY"
"""Variable that makes a follower compute something else from some step on."""


def main(model: str, options: dict[str, Any], prompts: list[Any]) -> None:
    args = EngineArgs(model=model, **(SIZES | options))
    if args.process_id:
        assert not join_hosts(args), "process 0 leads"
        if ASTRAY in os.environ:
            go_astray()
        follow_leader(args)
        return
    started = time.monotonic()
    llm = LLM(model=model, **(SIZES | options))
    greedy = [SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=2, prompt_logprobs=1) for _ in prompts]
    greedy[2] = SamplingParams(
        temperature=0, max_tokens=NUM_TOKENS, presence_penalty=0.5, min_tokens=3, logit_bias={5: 2.0}
    )
    drawn = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=NUM_TOKENS)
    print("ready", flush=True)
    while ENDLESS in os.environ:
        llm.generate(prompts, greedy, use_tqdm=False)
    runs = [llm.generate(prompts, params, use_tqdm=False) for params in (greedy, [drawn] * len(prompts), again(greedy))]
    print(json.dumps(what_came(llm, runs) | {"seconds": time.monotonic() - started}), flush=True)


def random_prompts() -> list[Any]:
    """Five that begin alike."""
    draw = np.random.default_rng(0)
    shared = draw.integers(0, 256, 13).tolist()
    return [{"prompt_token_ids": shared + draw.integers(0, 256, size).tolist()} for size in (3, 30, 9, 1, 20)]


def again(greedy: list[SamplingParams]) -> list[SamplingParams]:
    """The same, but what the prefix cache has of the prompts need not be computed."""
    params = copy.deepcopy(greedy)
    for each in params:
        each.prompt_logprobs = None
    return params


def what_came(llm: LLM, runs: list[list[RequestOutput]]) -> dict[str, Any]:
    """Tokens of every sample, logprobs of the greedy ones, and whether what the tests are about has happened.

    ``margin`` is the smallest distance between the logits of a greedy token and of the one after it.
    """
    outputs = [output for run in runs for output in run]
    scored = [sample for output in outputs for sample in output.outputs if sample.logprobs is not None]
    logprobs = [
        [scores[token].logprob for token, scores in zip(sample.token_ids, sample.logprobs or [], strict=True)]
        for sample in scored
    ]
    pairs = [[entry.logprob for entry in scores.values()] for sample in scored for scores in sample.logprobs or []]
    stats = llm.kv_cache_stats()
    return {
        "tokens": [[list(sample.token_ids) for sample in output.outputs] for output in outputs],
        "logprobs": logprobs,
        "margin": min(max(pair) - min(pair) for pair in pairs),
        "facts": {
            "swap_preemptions": stats.num_swap_preemptions,
            "recompute_preemptions": stats.num_recompute_preemptions,
            "cached_prompt_tokens": sum(output.num_cached_tokens or 0 for output in outputs),
        },
    }


def go_astray() -> None:
    """One token of the ninth command is another one, here alone."""
    obey, count = Worker.obey, 0

    def obey_wrongly(self: Worker, command: Command) -> Results | None:
        nonlocal count
        count += 1
        if count == 9:
            command = dataclasses.replace(command, packed=command.packed.copy())
            command.packed[0] = 255  # the first token, see Packing; no prompt has this one there
        return obey(self, command)

    Worker.obey = obey_wrongly  # pyright: ignore[reportAttributeAccessIssue]


if __name__ == "__main__":
    all_options = json.loads(sys.argv[2])
    if "num_processes" not in all_options[0]:
        jax.config.update("jax_num_cpu_devices", 8)
    for each in all_options:
        main(sys.argv[1], each, json.loads(sys.argv[3]) if len(sys.argv) > 3 else random_prompts())
        gc.collect()
