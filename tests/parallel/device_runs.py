"""Runs many_devices.py, in one process or as a group of them on this machine, and compares what came."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

PROGRAM = Path(__file__).parent / "many_devices.py"
TP, PP, DP = "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"
QUICK_TO_COMPILE = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
"""Variables for a tiny model, which takes longer to compile than to compute."""


@dataclasses.dataclass(frozen=True)
class Program:
    """many_devices.py with a model.

    Attributes:
        prompts: texts; None: the program's own, for a tiny model.
        variables: of the environment, besides those of the tests.
        timeout_s: for what one call of ``run`` or a group takes.
    """

    model: Path
    prompts: Sequence[str] | None = None
    variables: Mapping[str, str] = dataclasses.field(default_factory=QUICK_TO_COMPILE.copy)
    timeout_s: float = 500

    def run(self, options: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """What it prints for each set of options, in one process with eight devices."""
        ((code, output, log),) = Group([self._start(options)], self.timeout_s).ends()
        assert code == 0, log[-3000:]
        return [json.loads(line) for line in output.splitlines() if line.startswith("{")]

    def start(self, num_processes: int, options: dict[str, Any], **variables: str) -> Group:
        """Processes of one engine, at once."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        common = options | {"coordinator": f"127.0.0.1:{port}", "num_processes": num_processes}
        processes = [self._start([common | {"process_id": index}], variables) for index in range(num_processes)]
        return Group(processes, self.timeout_s)

    def _start(self, options: Sequence[dict[str, Any]], variables: Mapping[str, str] | None = None) -> Process:
        texts = [] if self.prompts is None else [json.dumps(self.prompts)]
        kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        return subprocess.Popen(
            [sys.executable, str(PROGRAM), str(self.model), json.dumps(options), *texts],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=kept | dict(self.variables) | dict(variables or {}),
        )


Process = subprocess.Popen[str]


@dataclasses.dataclass(frozen=True)
class Group:
    """Processes of one engine on this machine; the first leads."""

    processes: list[Process]
    timeout_s: float

    def wait_until_it_runs(self) -> None:
        output = self.processes[0].stdout
        assert output is not None
        assert output.readline() == "ready\n"
        time.sleep(1)  # into the first steps

    def ends(self) -> list[tuple[int, str, str]]:
        """Exit code, output and log of each."""
        try:
            outputs = [process.communicate(timeout=self.timeout_s) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()  # one that is late must not outlive its test
        return [(process.returncode, *texts) for process, texts in zip(self.processes, outputs, strict=True)]

    def result(self) -> dict[str, Any]:
        """What the leader prints, once all have ended well."""
        ends = self.ends()
        assert [code for code, *_ in ends] == [0] * len(ends), ends
        return json.loads(ends[0][1].splitlines()[-1])


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """The same tokens of every sample, and logprobs that differ by rounding only."""
    assert one["tokens"] == other["tokens"]
    for mine, theirs in zip(one["logprobs"], other["logprobs"], strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-3)
