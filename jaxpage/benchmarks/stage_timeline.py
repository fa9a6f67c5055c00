"""``python -m jaxpage.benchmarks.stage_timeline FILE``: when each stage of a real engine's pipeline computed what.

Runs a model with random weights and a small vocabulary, whose stages take about the same time, on virtual devices with
a thread each, decodes a fixed number of requests, and writes the steps in which all of them decode for
``jaxpage.benchmarks.pipeline --timeline FILE``. Needs as many free cores as there are stages, and one for the host.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import queue
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpage.benchmarks.http_streams import LLAMA
from jaxpage.benchmarks.pipeline import StageRun, idle_share

if TYPE_CHECKING:
    from jaxpage import LLM

ONE_THREAD_A_DEVICE = "--xla_cpu_multi_thread_eigen=false"
VOCAB_SIZE = 512
TOKENIZER = "smollm2-135m-instruct"
PROMPT_TOKENS = 8


class Recorder:
    """Watches the stages of an engine. Ends are waited for in a thread for each stage, so that nothing is held up."""

    def __init__(self, llm: LLM) -> None:
        from jaxpage.engine.front import Engine

        assert isinstance(llm.engine, Engine), "one engine"
        worker = llm.engine.core.runner.worker
        self.num_stages = len(worker.stages)
        self.ends_s: list[dict[int, float]] = [{} for _ in worker.stages]
        self.dispatches_s: dict[int, float] = {}
        self._outputs: list[queue.SimpleQueue[tuple[int, Any] | None]] = [queue.SimpleQueue() for _ in worker.stages]
        self._call = 0
        obey = worker.obey

        def noting(command: Any) -> Any:
            self._call = command.call
            self.dispatches_s[command.call] = time.perf_counter()
            return obey(command)

        worker.obey = noting
        for index, stage in enumerate(worker.stages):
            stage.run = self._watched(index, stage.run)
        self._threads = [
            threading.Thread(target=self._wait, args=(index,), daemon=True) for index in range(self.num_stages)
        ]
        for thread in self._threads:
            thread.start()

    def runs(self) -> list[StageRun]:
        """What was recorded, once all is done. A stage begins when it is free and has what it needs."""
        for outputs in self._outputs:
            outputs.put(None)
        for thread in self._threads:
            thread.join()
        free_s: dict[int, float] = defaultdict(float)
        runs = []
        for call in sorted(self.ends_s[-1]):
            ready_s = self.dispatches_s[call]
            if (before := self.ends_s[-1].get(call - self.num_stages)) is not None:
                ready_s = max(ready_s, before)
            for index in range(self.num_stages):
                start_s, ready_s = max(ready_s, free_s[index]), self.ends_s[index][call]
                free_s[index] = ready_s
                runs.append(StageRun(call, index, min(start_s, ready_s), ready_s))
        return runs

    def _watched(self, index: int, run: Any) -> Any:
        def watched(*arguments: Any) -> Any:
            output = run(*arguments)
            self._outputs[index].put((self._call, output))
            return output

        return watched

    def _wait(self, index: int) -> None:
        import jax

        while (item := self._outputs[index].get()) is not None:
            call, output = item
            jax.block_until_ready(output)
            self.ends_s[index][call] = time.perf_counter()


def record(num_stages: int, num_requests: int, num_tokens: int, num_layers: int, hidden_size: int) -> list[StageRun]:
    """Decodes, and gives the runs of the middle half of the steps, in which the pipeline is full."""
    from jaxpage import LLM, SamplingParams

    config = LLAMA | {"vocab_size": VOCAB_SIZE, "num_hidden_layers": num_layers * num_stages}
    config |= {"hidden_size": hidden_size, "intermediate_size": 4 * hidden_size}
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(config))
        length = PROMPT_TOKENS + num_tokens
        llm = LLM(
            model=directory,
            tokenizer=TOKENIZER,
            load_format="dummy",
            pipeline_parallel_size=num_stages,
            max_num_seqs=num_requests,
            max_num_batched_tokens=max(num_requests, PROMPT_TOKENS),
            max_model_len=length,
            block_size=16,
            num_gpu_blocks_override=num_requests * -(-length // 16),
        )
    prompts: Any = [{"prompt_token_ids": [index % VOCAB_SIZE] * PROMPT_TOKENS} for index in range(num_requests)]
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    recorder = Recorder(llm)
    llm.generate(prompts, params, use_tqdm=False)
    runs = recorder.runs()
    calls = sorted({run.call for run in runs})
    first, last = calls[len(calls) // 4], calls[3 * len(calls) // 4]
    return [run for run in runs if first <= run.call < last]


def main(argv: list[str] | None = None) -> None:
    """Records, writes, and prints the share of time in which stages stood idle."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", metavar="FILE", help="gets the timeline, as JSON")
    counts = {"stages": 2, "requests": 8, "tokens": 400, "layers": 4, "hidden-size": 512}
    for name, value in counts.items():
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N", help="default: %(default)s")
    options = parser.parse_args(argv)
    for name in counts:
        if getattr(options, name.replace("-", "_")) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name.replace('-', '_'))}")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {ONE_THREAD_A_DEVICE}".strip()
    runs = record(options.stages, options.requests, options.tokens, options.layers, options.hidden_size)
    Path(options.file).write_text(json.dumps([dataclasses.asdict(run) for run in runs], indent=1) + "\n")
    for stage in range(options.stages):
        times_ms = [1e3 * (run.end_s - run.start_s) for run in runs if run.stage == stage]
        print(f"stage {stage}: {sum(times_ms) / len(times_ms):.2f} ms a step")
    print(f"idle: {100 * idle_share(runs):.1f} % of the time, over {len(runs) // options.stages} steps")


if __name__ == "__main__":
    main()
