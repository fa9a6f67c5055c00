"""Owns several engines with the same model behind one: where they run, and which of them gets which request.

It must not know HTTP, nor how an engine works. jax is imported only for engines in this process.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import copy
import dataclasses
import logging
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from jaxpage.config import EngineArgs
from jaxpage.console import NoTerminal
from jaxpage.engine.intake import Intake, Params
from jaxpage.engine.replicas.child_process import ChildProcess
from jaxpage.engine.replicas.devices import split_devices, visibility
from jaxpage.engine.replicas.remote import Peer, RemoteEngine
from jaxpage.engine.replicas.replica import KV_CACHE_STATS, SNAPSHOT, Replica, dead
from jaxpage.engine.replicas.routing import Router
from jaxpage.engine.replicas.sums import summed_cache_stats, summed_snapshots
from jaxpage.engine.replicas.supervision import Supervisor
from jaxpage.engine.tokenizer_source import load_tokenizer
from jaxpage.errors import EngineDeadError
from jaxpage.kv.manager import KVCacheStats
from jaxpage.metrics import EngineMetrics, StatusLine, SummedMetrics
from jaxpage.params import BeamSearchParams, PoolingParams, SamplingParams
from jaxpage.scheduler.snapshot import EngineSnapshot
from jaxpage.weights.source import resolve_model

if TYPE_CHECKING:
    from jaxpage.engine.front import Engine

logger = logging.getLogger("jaxpage")

STATUS_INTERVAL_S = 10.0
DRAIN_POLL_S = 0.02


class EngineGroup:
    """One or more engines. Methods may be called from any thread.

    A request stays with the engine that it was sent to: if that dies, the request ends with an error. It is not tried
    elsewhere, since it may be what the engine died of.

    Args:
        engines: may be replaced, one by one, by whoever made the group.
        close: ends the engines and their requests.

    Attributes:
        intake: turns prompts into ids and checks them, for all engines alike.
    """

    def __init__(
        self,
        args: EngineArgs,
        intake: Intake,
        engines: Sequence[Replica],
        router: Router,
        close: Callable[[], None],
    ) -> None:
        self.args = args
        self.intake = intake
        self.engines = engines
        self._router = router
        self._close = close
        self._has_names = len(engines) > 1 and intake.facts.config.enable_prefix_caching
        self._seeds = random.Random(args.seed)

    @classmethod
    def of_one(cls, engine: Engine) -> EngineGroup:
        """A loaded engine, in a thread of this process."""
        from jaxpage.engine.replicas.local import LocalEngine

        local = LocalEngine(engine)
        return cls(engine.args, engine.intake, [local], _router(1, engine.intake), lambda: _end([local]))

    @property
    def metrics(self) -> list[EngineMetrics]:
        """Of each engine, by number."""
        return [engine.metrics for engine in self.engines]

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return sum(engine.num_unfinished for engine in self.engines)

    @property
    def failure(self) -> BaseException | None:
        """What ended an engine, if all have ended and not all were shut down."""
        reasons = [engine.failure for engine in self.engines if engine.failure is not None]
        return reasons[0] if self.is_dead and reasons else None

    @property
    def is_dead(self) -> bool:
        """No engine lives."""
        return all(engine.is_dead for engine in self.engines)

    def raise_if_dead(self) -> None:
        """Raises EngineDeadError if no engine lives."""
        if self.is_dead:
            raise dead(self.failure)

    def seeded(self, params: Params) -> Params:
        """``params`` with a seed, where it has none: engines that draw their own would all draw the same ones."""
        if not isinstance(params, SamplingParams) or params.seed is not None:
            return params
        params = copy.copy(params)
        params.seed = self._seeds.getrandbits(63)
        return params

    def names(self, token_ids: Sequence[int], cache_salt: str | None) -> list[bytes]:
        """What ``claimed`` needs to know of a prompt; takes a while for a long one."""
        return self._router.names(token_ids, cache_salt) if self._has_names else []

    @contextlib.contextmanager
    def claimed(self, names: Sequence[bytes], num_prompt_tokens: int, params: Params) -> Iterator[Replica]:
        """The engine for a prompt, which counts as busy with it meanwhile.

        Raises:
            EngineDeadError: if none lives.
        """
        engines = list(self.engines)
        living = [number for number, engine in enumerate(engines) if not engine.is_dead]
        if not living:
            raise dead(self.failure)
        num_samples, num_tokens = self._work(num_prompt_tokens, params)
        number = self._router.choose(names, num_samples, num_tokens, living)
        try:
            yield engines[number]
        finally:
            self._router.done(number, num_samples, num_tokens)

    def _work(self, num_prompt_tokens: int, params: Params) -> tuple[int, int]:
        """Samples and tokens that a prompt stands for."""
        if isinstance(params, PoolingParams):
            return 1, num_prompt_tokens
        room = self.intake.facts.config.max_model_len - num_prompt_tokens
        length = room if params.max_tokens is None else min(params.max_tokens, room)
        num_samples = params.beam_width if isinstance(params, BeamSearchParams) else params.n
        return num_samples, num_prompt_tokens + num_samples * length

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes that nobody uses."""
        self.raise_if_dead()
        for number, engine in enumerate(self.engines):
            self._router.forget(number)
            with contextlib.suppress(EngineDeadError):
                engine.reset_prefix_cache()

    async def snapshot(self) -> EngineSnapshot:
        """The engines that live as one picture."""
        futures = [asyncio.wrap_future(each) for each in self._asked(SNAPSHOT)]
        pictures = await asyncio.gather(*futures, return_exceptions=True)
        return summed_snapshots(self._answered(pictures))

    def kv_cache_stats(self) -> KVCacheStats:
        """The caches of the engines that live as one; waits for steps to end."""
        asked = self._asked(KV_CACHE_STATS)
        concurrent.futures.wait(asked)
        return summed_cache_stats(self._answered([each.exception() or each.result() for each in asked]))

    def start_profile(self, directory: Path) -> None:
        """See ``Replica.start_profile``. Each process's profile is in a folder of its own."""
        self.raise_if_dead()
        for number, engine in self._processes():
            engine.start_profile(directory / f"engine-{number}" if number else directory)

    def stop_profile(self) -> None:
        """See ``Replica.stop_profile``."""
        self.raise_if_dead()
        for _, engine in self._processes():
            engine.stop_profile()

    def shutdown(self, drain_timeout_s: float | None = None) -> None:
        """Ends all engines: lets running requests finish for so many seconds, then ends the rest."""
        deadline_s = time.monotonic() + (drain_timeout_s or 0.0)
        while self._is_busy and time.monotonic() < deadline_s:
            time.sleep(DRAIN_POLL_S)
        self._close()

    @property
    def _is_busy(self) -> bool:
        return any(engine.num_unfinished and not engine.is_dead for engine in self.engines)

    def _processes(self) -> list[tuple[int, Replica]]:
        """One living engine for each process."""
        living = [(number, engine) for number, engine in enumerate(self.engines) if not engine.is_dead]
        return living[:1] if self.args.data_parallel_backend == "thread" else living

    def _asked(self, question: str) -> list[concurrent.futures.Future[Any]]:
        self.raise_if_dead()
        asked: list[concurrent.futures.Future[Any]] = []
        for engine in self.engines:
            with contextlib.suppress(EngineDeadError):
                asked.append(engine.ask(question))
        return asked

    def _answered(self, answers: Sequence[Any]) -> list[Any]:
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, EngineDeadError):
                raise answer
        good = [answer for answer in answers if not isinstance(answer, BaseException)]
        if not good:
            raise dead(self.failure)
        return good


def open_engines(args: EngineArgs) -> EngineGroup:
    """The engines that ``args`` ask for, loaded and warmed up; blocks for seconds.

    Raises:
        ValueError, OSError, StartupError: in one line, for anything that keeps an engine from starting.
    """
    if args.data_parallel_backend != "thread":
        return _in_processes(args)
    if args.data_parallel_size > 1:
        return _in_threads(args)
    from jaxpage.engine.front import Engine

    return EngineGroup.of_one(Engine(args))


def _end(engines: Sequence[Replica]) -> None:
    """Ends them together."""
    for engine in engines:
        engine.stop()
    for engine in engines:
        engine.join()


def _in_threads(args: EngineArgs) -> EngineGroup:
    import jax

    from jaxpage.engine.build import configure_jax
    from jaxpage.engine.front import Engine
    from jaxpage.engine.replicas.local import LocalEngine

    configure_jax(args)
    own_args = dataclasses.replace(args, data_parallel_size=1, disable_log_stats=True)
    devices = split_devices(jax.local_devices(), args.data_parallel_size, args.num_devices)
    # The first one alone: where jax keeps compiled programs for all devices alike, as on GPUs, the others find its own.
    first = Engine(own_args, devices[0])
    constraints = first.intake.constraints
    with (
        contextlib.redirect_stderr(cast(TextIO, NoTerminal(sys.stderr))),  # their progress bars would mix
        concurrent.futures.ThreadPoolExecutor(len(devices) - 1) as threads,
    ):
        loaded = [first, *threads.map(lambda own: Engine(own_args, own, constraints), devices[1:])]
    engines = [LocalEngine(engine) for engine in loaded]
    status = _Status(args, [engine.metrics for engine in engines])

    def close() -> None:
        status.close()
        _end(engines)

    intake = loaded[0].intake
    return EngineGroup(args, intake, engines, _router(len(engines), intake), close)


def _in_processes(args: EngineArgs) -> EngineGroup:
    count = args.data_parallel_size
    own_args = dataclasses.replace(
        args,
        data_parallel_size=1,
        data_parallel_backend="thread",
        disable_log_stats=True,
        num_processes=None if args.data_parallel_backend == "ray" else args.num_processes,
    )
    start_peer = _peers(args, own_args)
    routers: list[Router] = []

    def start(
        number: int, metrics: EngineMetrics | None, on_death: Callable[[RemoteEngine], None]
    ) -> RemoteEngine:  # fmt: skip
        name = "" if count == 1 else f"engine {number}"
        return RemoteEngine(start_peer(number), own_args, name, metrics, on_death)

    def on_death(number: int) -> None:
        for router in routers:
            router.forget(number)

    resolve_model(args.model, args.revision)  # what has to be fetched is fetched once, and errors come at once
    supervisor = Supervisor(count, start, on_death)
    try:
        tokenizer = load_tokenizer(args)  # while the engines load
    except BaseException:
        supervisor.close()
        raise
    supervisor.wait_until_ready()
    intake = Intake(
        tokenizer, min((each.facts for each in supervisor.engines), key=lambda each: each.num_usable_blocks)
    )
    routers.append(_router(count, intake))
    status = _Status(args, [engine.metrics for engine in supervisor.engines])

    def close() -> None:
        atexit.unregister(close)
        status.close()
        supervisor.close()

    # A program that ends need not have asked for it. Ray was imported before, so that its own handler comes later.
    atexit.register(close)
    return EngineGroup(args, intake, supervisor.engines, routers[0], close)


def _peers(args: EngineArgs, own_args: EngineArgs) -> Callable[[int], Peer]:
    """What starts the process, or processes, of an engine, given its number."""
    if args.data_parallel_backend == "ray":
        from jaxpage.engine.replicas.ray_replica import RayCluster, RayProcesses

        cluster = RayCluster(own_args, args.num_processes or 1)
        return lambda number: RayProcesses(cluster)
    if args.data_parallel_size == 1:
        return lambda number: ChildProcess()
    return lambda number: ChildProcess(visibility(number, args.num_devices, os.environ))


def _router(num_engines: int, intake: Intake) -> Router:
    facts = intake.facts
    return Router(num_engines, facts.config.block_size, facts.num_usable_blocks)


class _Status:
    """Writes the status line of several engines, as long as they do something."""

    def __init__(self, args: EngineArgs, metrics: Sequence[EngineMetrics]) -> None:
        self._closing = threading.Event()
        if not args.disable_log_stats:
            summed = SummedMetrics(metrics)
            threading.Thread(target=self._run, args=(summed,), name="jaxpage-status", daemon=True).start()

    def close(self) -> None:
        """Ends it."""
        self._closing.set()

    def _run(self, metrics: SummedMetrics) -> None:
        status, last = StatusLine(metrics, time.monotonic()), metrics.read()
        while not self._closing.wait(STATUS_INTERVAL_S):
            now = metrics.read()
            is_idle = (now.counts, now.num_generation_tokens) == (last.counts, last.num_generation_tokens)
            last = now
            if not is_idle or now.counts.num_running:
                text, figures = status.next(time.monotonic())
                logger.info(text, extra=figures)
