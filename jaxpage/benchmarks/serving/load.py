"""Sends requests at their times, a bounded number at once. Knows nothing of what they ask or of statistics."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import rich.console
import rich.progress

from jaxpage.benchmarks.serving.client import RequestRecord, Target
from jaxpage.benchmarks.serving.datasets import Sample


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        started_s: on the records' clock.
        duration_s: from the start until the last answer's end.
        client_cpu_s: processor time of this process meanwhile: near the duration, it was this side that was slow.
    """

    records: list[RequestRecord]
    started_s: float
    duration_s: float
    client_cpu_s: float


async def run_load(
    target: Target,
    samples: Sequence[Sample],
    times_s: Sequence[float],
    *,
    max_concurrency: int | None = None,
    id_prefix: str = "bench-",
    shows_progress: bool = True,
) -> Run:
    """Sends ``samples[i]`` ``times_s[i]`` seconds after the start, later if ``max_concurrency`` are in flight."""
    room = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    console = rich.console.Console(stderr=True)
    with rich.progress.Progress(
        *rich.progress.Progress.get_default_columns(),
        rich.progress.MofNCompleteColumn(),
        console=console,
        transient=True,
        disable=not (shows_progress and sys.stderr.isatty()),
    ) as bar:
        task = bar.add_task("requests", total=len(samples))

        async def send(index: int, due_s: float) -> RequestRecord:
            async with room:
                record = await target.send(samples[index], f"{id_prefix}{index}", due_s)
            bar.advance(task)
            return record

        gc.collect()
        gc.freeze()  # what exists now is not searched again: no pauses that would look like the server's
        cpu, started = time.process_time(), time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = []
                for index, time_s in enumerate(times_s):
                    wait = started + time_s - time.perf_counter()
                    if wait > 0:
                        await asyncio.sleep(wait)
                    tasks.append(group.create_task(send(index, started + time_s)))
        finally:
            gc.unfreeze()
        ended, cpu = time.perf_counter(), time.process_time() - cpu
    return Run([task.result() for task in tasks], started, ended - started, cpu)
