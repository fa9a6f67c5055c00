"""A program: generates with a tiny model on several devices or processes, and prints what came. Not a test itself.

Usage: python many_devices.py MODEL_DIR OPTIONS, where OPTIONS is a JSON array of objects of engine options: there is a
line of output for each. With a process_id above 0 it follows, and prints nothing. See test_many_devices.py.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

from jaxpage import LLM, SamplingParams
from jaxpage.batch import StepOutput
from jaxpage.config import EngineArgs
from jaxpage.engine.build import follow_leader, join_hosts
from jaxpage.engine.front import Engine
from jaxpage.runner.commands import Command
from jaxpage.runner.worker import Worker

SIZES: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 16, "block_size": 4}
SIZES |= {"num_gpu_blocks_override": 24, "enforce_eager": True, "dtype": "float32"}
FACTS = ("swap_preemptions", "recompute_preemptions", "cached_prompt_tokens")
ENDLESS = "ENDLESS"
"""Variable that makes the leader generate until it is killed."""
ASTRAY = "GO_ASTRAY"
"""Variable that makes a follower compute something else from some step on."""


def main(model: str, options: dict[str, Any]) -> None:
    args = EngineArgs(model=model, **(SIZES | options))
    if args.process_id:
        assert not join_hosts(args), "process 0 leads"
        if ASTRAY in os.environ:
            go_astray()
        follow_leader(args)
        return
    llm = LLM(model=model, **(SIZES | options))
    draw = np.random.default_rng(0)
    shared = draw.integers(0, 256, 13).tolist()
    prompts: Any = [{"prompt_token_ids": shared + draw.integers(0, 256, size).tolist()} for size in (3, 30, 9, 1, 20)]
    greedy = [SamplingParams(temperature=0, max_tokens=12, logprobs=2, prompt_logprobs=1) for _ in prompts]
    greedy[2] = SamplingParams(temperature=0, max_tokens=12, presence_penalty=0.5, min_tokens=3, logit_bias={5: 2.0})
    drawn = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=10)
    print("ready", flush=True)
    while ENDLESS in os.environ:
        llm.generate(prompts, greedy, use_tqdm=False)
    runs = [llm.generate(prompts, greedy, use_tqdm=False), llm.generate(prompts, drawn, use_tqdm=False)]
    tokens = [[list(sample.token_ids) for sample in output.outputs] for run in runs for output in run]
    logprobs = [
        [scores[token].logprob for token, scores in zip(sample.token_ids, sample.logprobs, strict=True)]
        for output in runs[0] for sample in output.outputs if sample.logprobs is not None
    ]  # fmt: skip
    facts = {}
    if isinstance(llm.engine, Engine):
        facts = {name: getattr(llm.engine.core.scheduler.stats, f"num_{name}") for name in FACTS}
    print(json.dumps({"tokens": tokens, "logprobs": logprobs, "facts": facts}), flush=True)


def go_astray() -> None:
    """One token of the ninth command is another one, here alone."""
    obey, count = Worker.obey, 0

    def obey_wrongly(self: Worker, command: Command) -> StepOutput | None:
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
        main(sys.argv[1], each)
        gc.collect()
