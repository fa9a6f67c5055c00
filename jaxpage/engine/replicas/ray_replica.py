"""Owns the processes of engines that Ray places and starts: where there is room for their devices, on any host.

It must not know what is said to an engine (``remote``), nor when one is started again (``supervision``). Ray decides
where a process runs and says when it has ended; messages go over a connection of their own. Needs no jax.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import secrets
import socket
import threading
import time
from typing import Any, cast

from jaxpage.config import EngineArgs
from jaxpage.engine.replicas.ray_host import SECRET_BYTES, Host, Part, Place, call
from jaxpage.engine.replicas.wire import Connection
from jaxpage.errors import StartupError

logger = logging.getLogger("jaxpage")

PLACEMENT_TIMEOUT_S = 300.0
"""How long an engine waits for a place: a cluster that grows with its load takes minutes to."""
PATIENCE_S = 5.0
"""After that it says what it waits for."""
POLL_S = 0.25
LAST_WORDS_S = 2.0
"""Time for what processes say at their end, of which Ray may know first."""
MAX_REASON_LENGTH = 200
"""Of what Ray says, in characters."""


class RayCluster:
    """The cluster that this program belongs to: ``RAY_ADDRESS`` names it, else one that runs here, else a new one.

    Args:
        args: of one engine, as its processes get them.
        num_processes: of one engine, a host each. They get the variables of their hosts, not of this one.

    Raises:
        StartupError: if Ray is not installed or its cluster not there.
    """

    def __init__(self, args: EngineArgs, num_processes: int) -> None:
        self.ray = import_ray()
        self.args = args
        self.num_processes = num_processes
        self.num_devices = args.num_devices // num_processes
        if not self.ray.is_initialized():
            try:
                self.ray.init(logging_level=logging.WARNING)
            except (OSError, RuntimeError, ValueError) as error:
                raise StartupError(f"cannot join a Ray cluster: {_shortened(str(error))}") from error

    def bundle(self) -> dict[str, float]:
        """What a process takes of the cluster: of its accelerators, if it has any."""
        there = self.ray.cluster_resources()
        for kind in ("TPU", "GPU"):
            if there.get(kind):
                return {"CPU": 1, kind: self.num_devices}
        return {"CPU": self.num_devices}

    def lack(self, bundle: dict[str, float]) -> str:
        """In words, what an engine needs and the cluster has."""
        there = self.ray.cluster_resources()
        num_hosts = sum(node["Alive"] for node in self.ray.nodes())
        kinds = {kind: there.get(kind, 0) for kind in bundle}
        return f"{self.num_processes} x {_counted(bundle)} in a cluster with {_counted(kinds)} on {num_hosts} host(s)"


class RayProcesses:
    """The processes of one engine, as actors of Ray; a ``Peer``. The first is at the other end of ``connection``.

    They need not have found their place when the constructor returns. Ray puts those together that fit on one host. All
    end with the first of them that ends, and with this program.

    Attributes:
        places: of the processes, once they run.
    """

    def __init__(self, cluster: RayCluster) -> None:
        self._cluster = cluster
        self._ray = cluster.ray
        self._stream: concurrent.futures.Future[socket.socket] = concurrent.futures.Future()
        self.connection = Connection(cast(socket.socket, _Awaited(self._stream)))
        self.places: list[Place] = []
        self._actors: list[Any] = []
        self._is_killed = threading.Event()
        self._ended = threading.Event()
        self._reason = "its process no longer answers"
        threading.Thread(target=self._run, name="jaxpage-ray", daemon=True).start()

    def kill(self) -> None:
        """Ends them without asking."""
        self._is_killed.set()

    def wait(self, timeout_s: float) -> bool:
        """Waits for their end; False if that did not come in time."""
        return self._ended.wait(timeout_s)

    def how_it_ended(self) -> str:
        """In words."""
        return self._reason

    def _run(self) -> None:
        try:
            self._live()
        except (StartupError, self._ray.exceptions.RayError) as error:
            self._reason = _said(error)
        except Exception as error:
            logger.exception("Ray is not understood")
            self._reason = repr(error)
            error.__traceback__ = None  # as in _said
        # From here on the program may leave its cluster. Ray ends a program at once that touches it after that, if only
        # by dropping a reference.
        self._actors.clear()
        if not self._stream.done():
            self._stream.set_exception(ConnectionAbortedError(self._reason))
        self._ended.set()
        # A host that has lost its power closes no connection.
        time.sleep(LAST_WORDS_S)
        with contextlib.suppress(OSError):
            self._stream.result().shutdown(socket.SHUT_RDWR)

    def _live(self) -> None:
        """Their life, from looking for a place on; no reference of Ray's outlives it but ``_actors``."""
        bundle = self._cluster.bundle()
        group = self._ray.util.placement_group([bundle] * self._cluster.num_processes, strategy="PACK")
        try:
            self._await_place(group, bundle)
            self._await_end(self._started(group, bundle))
        finally:
            with contextlib.suppress(Exception):  # the cluster itself may be gone
                self._ray.util.remove_placement_group(group)  # and with it what still runs there

    def _await_place(self, group: Any, bundle: dict[str, float]) -> None:
        began_s, is_told = time.monotonic(), False
        while not group.wait(POLL_S):
            waited_s = time.monotonic() - began_s
            if self._is_killed.is_set():
                raise StartupError("it was ended before it had a place")
            if waited_s > PLACEMENT_TIMEOUT_S:
                raise StartupError(f"Ray has found no place in {waited_s:.0f} s for {self._cluster.lack(bundle)}")
            if waited_s > PATIENCE_S and not is_told:
                logger.warning("Waiting for a place for %s", self._cluster.lack(bundle))
                is_told = True

    def _started(self, group: Any, bundle: dict[str, float]) -> list[Any]:
        """Starts them all and connects to the first; gives what Ray calls their results."""
        cluster, get = self._cluster, self._ray.get
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        accelerators = {kind: count for kind, count in bundle.items() if kind == "TPU"}
        options = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "resources": accelerators}
        actor_class = self._ray.remote(Host)
        # Ray ends actors that nobody refers to.
        self._actors = actors = [
            actor_class.options(scheduling_strategy=strategy(group, index), **options).remote()
            for index in range(cluster.num_processes)
        ]
        self.places = [Place(*place) for place in get([actor.place.remote() for actor in actors])]
        leader, *followers = actors
        parts: list[Part | None] = [None]
        if followers:
            coordinator = get(leader.coordinator.remote())
            parts = [Part(coordinator, cluster.num_processes, index) for index in range(cluster.num_processes)]
        secret = secrets.token_bytes(SECRET_BYTES)
        runs = [leader.lead.remote(secret, cluster.num_devices, parts[0])]
        for follower, part in zip(followers, parts[1:], strict=True):
            runs.append(follower.follow.remote(cluster.args, cluster.num_devices, part))
        try:
            self._stream.set_result(call(self.places[0], secret))
        except OSError as error:
            raise StartupError(f"its process on {self.places[0].host} cannot be reached: {error}") from error
        return runs

    def _await_end(self, runs: list[Any]) -> None:
        """Returns once they are to be killed or have ended; keeps how the first has."""
        ended: list[Any] = []
        while not ended:
            ended, _ = self._ray.wait(runs, timeout=POLL_S)
            if self._is_killed.is_set():
                return
        index = runs.index(ended[0])
        which = f" {index} of {len(runs)}" if len(runs) > 1 else ""
        try:
            self._ray.get(ended)
            how = "in order"
        except self._ray.exceptions.RayError as error:
            how = _said(error)
        self._reason = f"its process{which} on {self.places[index].host} has ended: {how}"
        self._ray.wait(runs, num_returns=len(runs), timeout=LAST_WORDS_S)


class _Awaited:
    """As much of a socket as a ``Connection`` uses of one that is still to come."""

    def __init__(self, coming: concurrent.futures.Future[socket.socket]) -> None:
        self._coming = coming

    def recv_into(self, view: memoryview) -> int:
        return self._coming.result().recv_into(view)

    def sendall(self, content: bytes) -> None:
        self._coming.result().sendall(content)

    def shutdown(self, how: int) -> None:
        if self._coming.done():
            self._coming.result().shutdown(how)

    def close(self) -> None:
        if self._coming.done() and self._coming.exception() is None:
            self._coming.result().close()


def import_ray() -> Any:
    """Ray, whose types are not known where it is not installed.

    Raises:
        StartupError: if it is not.
    """
    try:
        import ray
        import ray.exceptions
        import ray.util.placement_group
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise StartupError(f"data_parallel_backend ray needs Ray ({error}): pip install 'jaxpage[ray]'") from error
    return ray


def _counted(resources: dict[str, float]) -> str:
    return " and ".join(f"{count:g} {kind}" for kind, count in resources.items())


def _said(error: BaseException) -> str:
    """How a process ended. Ray wraps what was raised there, and goes on for a while about what it knows itself.

    Forgets where the error was raised: frames there know the error, and it would keep theirs, with what they refer to,
    until a collection of garbage.
    """
    error.__traceback__ = None
    cause = getattr(error, "cause", None)
    if cause is not None:
        return _shortened(f"{type(cause).__name__}: {cause}")
    lines = str(error).strip().splitlines()
    # What it guesses are common causes fits no line.
    return _shortened((lines[-1] if lines else repr(error)).partition(" Some common causes")[0])


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_REASON_LENGTH else text[: MAX_REASON_LENGTH - 3] + "..."
