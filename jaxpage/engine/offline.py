"""Owns how a program without an event loop has its prompts computed: step by step, or by engines that run themselves.

It must not know what becomes of the outputs.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

from jaxpage.engine.async_engine import AsyncLLMEngine
from jaxpage.engine.front import Engine, Output
from jaxpage.engine.intake import Intake, Params
from jaxpage.kv.manager import KVCacheStats
from jaxpage.params import TokensPrompt


@dataclasses.dataclass(frozen=True, slots=True)
class OfflineJob:
    """One checked prompt of a call, whose outputs come at the end.

    Attributes:
        text: the prompt as text, if it came as such.
    """

    request_id: str
    text: str | None
    token_ids: list[int]
    params: Params
    priority: int
    cache_salt: str | None


class Driver(Protocol):
    """Computes jobs, and knows the state of what it computes them with.

    Attributes:
        intake: turns prompts into ids and checks them.
    """

    intake: Intake

    def run(self, jobs: Sequence[OfflineJob], on_output: Callable[[Output], None]) -> None:
        """Returns when every job has had its output; whatever ends it early leaves nothing running."""
        ...

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes."""
        ...

    def kv_cache_stats(self) -> KVCacheStats:
        """What the KV cache holds now, and what has happened in it since the start."""
        ...


class SteppedDriver:
    """Runs an engine in the caller's thread."""

    def __init__(self, engine: Engine) -> None:
        self.intake = engine.intake
        self._engine = engine

    def run(self, jobs: Sequence[OfflineJob], on_output: Callable[[Output], None]) -> None:
        engine = self._engine
        try:
            for job in jobs:
                engine.add(
                    job.request_id,
                    job.token_ids,
                    job.params,
                    prompt=job.text,
                    cache_salt=job.cache_salt,
                    priority=job.priority,
                )
            while engine.has_work:
                for output in engine.step():
                    on_output(output)
        finally:
            for job in jobs:  # after an interruption the engine must be free for the next call
                engine.abort(job.request_id)

    def reset_prefix_cache(self) -> None:
        self._engine.core.scheduler.kv.reset_prefix_cache()

    def kv_cache_stats(self) -> KVCacheStats:
        return self._engine.core.scheduler.kv_cache_stats()


class AsyncDriver:
    """Has engines work that run by themselves. Its event loop has a thread of its own: the caller may have one, too."""

    def __init__(self, engine: AsyncLLMEngine) -> None:
        self.intake = engine.group.intake
        self._engine = engine

    def run(self, jobs: Sequence[OfflineJob], on_output: Callable[[Output], None]) -> None:
        # Seeds are drawn in the order of the prompts, as one engine would draw them.
        seeded = [dataclasses.replace(job, params=self._engine.group.seeded(job.params)) for job in jobs]
        with concurrent.futures.ThreadPoolExecutor(1, "jaxpage-offline") as thread:
            loop = asyncio.new_event_loop()
            task = loop.create_task(self._run_all(seeded, on_output))
            done = thread.submit(loop.run_until_complete, task)
            try:
                done.result()
            except KeyboardInterrupt:
                loop.call_soon_threadsafe(task.cancel)
                with contextlib.suppress(asyncio.CancelledError):
                    done.result()
                raise
            finally:
                loop.close()

    async def _run_all(self, jobs: Sequence[OfflineJob], on_output: Callable[[Output], None]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for job in jobs:
                    group.create_task(self._run_one(job, on_output))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the first one ended the others

    async def _run_one(self, job: OfflineJob, on_output: Callable[[Output], None]) -> None:
        prompt = TokensPrompt(prompt_token_ids=job.token_ids)
        if job.text is not None:
            prompt["prompt"] = job.text
        outputs = self._engine.outputs(prompt, job.params, job.request_id, job.cache_salt, job.priority)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                on_output(output)

    def reset_prefix_cache(self) -> None:
        self._engine.group.reset_prefix_cache()

    def kv_cache_stats(self) -> KVCacheStats:
        return self._engine.group.kv_cache_stats()
