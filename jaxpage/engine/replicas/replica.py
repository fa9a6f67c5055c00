"""Owns what a front end asks of an engine, wherever that runs: in a thread of this process or in another one.

It must not know either of them.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from pathlib import Path
from typing import Any, Protocol

from jaxpage.engine.delivery import Stream
from jaxpage.engine.facts import EngineFacts
from jaxpage.engine.intake import Params
from jaxpage.errors import EngineDeadError
from jaxpage.metrics import EngineMetrics

SNAPSHOT, KV_CACHE_STATS = "snapshot", "kv_cache_stats"
"""What an engine can be asked; it answers between two steps."""


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A checked prompt on its way to an engine.

    Attributes:
        text: the prompt as text, if it came as such.
        arrival_s: when its call came, on this process's monotonic clock.
    """

    request_id: str
    text: str | None
    token_ids: list[int]
    params: Params
    cache_salt: str | None
    priority: int
    arrival_s: float


class Replica(Protocol):
    """An engine that runs by itself. All methods may be called from any thread and, but for those that say so, return
    at once; all raise EngineDeadError once the engine has ended, except ``shutdown``."""

    metrics: EngineMetrics

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine; None while it runs and after ``shutdown``."""
        ...

    @property
    def is_dead(self) -> bool:
        """True once a fault or ``shutdown`` has ended the engine."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        ...

    def add(self, stream: Stream, job: Job) -> None:
        """Queues a prompt; its outputs, or what is wrong with it, come through ``stream``."""
        ...

    def abort(self, request_id: str) -> None:
        """Ends a request; its stream gets a last output. An unknown id is ignored."""
        ...

    def leave(self, stream: Stream, request_id: str) -> None:
        """Ends a request whose ``stream`` nobody reads any more."""
        ...

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes that nobody uses."""
        ...

    def ask(self, question: str) -> concurrent.futures.Future[Any]:
        """The answer to ``SNAPSHOT`` or ``KV_CACHE_STATS``."""
        ...

    def start_profile(self, directory: Path) -> None:
        """Begins to record a JAX profile of the engine's process. Blocks.

        Raises:
            ParameterError: if one is being recorded.
        """
        ...

    def stop_profile(self) -> None:
        """Ends the profile and writes it. Blocks, for seconds.

        Raises:
            ParameterError: if none is being recorded.
        """
        ...

    def stop(self) -> None:
        """Tells the engine to end, and its requests with it. Returns at once, so that several end together."""
        ...

    def join(self) -> None:
        """Waits for the end of an engine that was told to stop."""
        ...


def dead(failure: BaseException | None) -> EngineDeadError:
    """What requests of an ended engine get; ``failure`` None: it was shut down."""
    error = EngineDeadError(f"the engine has stopped: {failure or 'it was shut down'}")
    error.__cause__ = failure
    return error
