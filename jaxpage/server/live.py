"""Owns ``GET /live``: pictures of the engine as a stream of events, for the page at ``/`` and whoever else watches.

It must not know how the scheduler works; it shapes what ``engine.snapshot()`` gives.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable
from itertools import pairwise
from typing import Any

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from jaxpage.errors import EngineDeadError
from jaxpage.kv.block_map import BlockState, cell_counts, state_counts
from jaxpage.scheduler.snapshot import EngineSnapshot, RequestSnapshot
from jaxpage.server.state import ApiServer
from jaxpage.server.streaming import EventStream

INTERVAL_S = 0.25
MAX_COST = 0.01
"""The largest share of the engine's time that watching may take: a huge pool is looked at less often."""
MAX_CELLS = 4096
"""Pools with more blocks are shown by cells of several neighbours."""
ID_LENGTH = 8
"""Enough of a request's random id to tell it from others."""
LETTERS = {
    BlockState.FREE: ".",
    BlockState.CACHED: "c",
    BlockState.USED: "u",
    BlockState.SHARED: "s",
    BlockState.SCRATCH: "x",
}
_LETTER_OF = bytes.maketrans(bytes(LETTERS), "".join(LETTERS.values()).encode())


class LiveView:
    """Pictures of one engine: at most one per interval, however many watch, and none when nobody does."""

    def __init__(self, engine: Any, interval_s: float = INTERVAL_S) -> None:
        """``engine``: an ``AsyncLLMEngine`` or anything with its ``snapshot``."""
        self._engine = engine
        self._interval_s = interval_s
        self._due_s = 0.0
        self._upcoming: asyncio.Task[dict[str, Any]] | None = None

    async def next(self) -> dict[str, Any]:
        """The next picture; all who wait for it get the same one.

        Raises:
            EngineDeadError: if the engine has ended.
        """
        if self._upcoming is None or self._upcoming.done():
            self._upcoming = asyncio.ensure_future(self._take())
            self._upcoming.add_done_callback(_note_failure)
        return await asyncio.shield(self._upcoming)  # one watcher that leaves must not take it from the others

    async def _take(self) -> dict[str, Any]:
        await asyncio.sleep(self._due_s - time.monotonic())
        started_s = time.monotonic()
        snapshot: EngineSnapshot = await self._engine.snapshot()
        self._due_s = started_s + max(self._interval_s, snapshot.cost_s / MAX_COST)
        return picture(snapshot)


def _note_failure(task: asyncio.Task[Any]) -> None:
    """Everybody may have left before it failed; asyncio would complain that nobody asked why."""
    if not task.cancelled():
        task.exception()


def picture(snapshot: EngineSnapshot) -> dict[str, Any]:
    """What an event says of the engine. ``map`` and counts leave out nothing; lists of requests are cut."""
    counts = state_counts(snapshot.block_states)
    return {
        "time": round(snapshot.time_s, 3),
        "block_size": snapshot.block_size,
        "blocks": {
            "usable": len(snapshot.block_states) - counts[BlockState.SCRATCH],
            "free": counts[BlockState.FREE],
            "cached": counts[BlockState.CACHED],
            "used": counts[BlockState.USED],
            "shared": counts[BlockState.SHARED],
        },
        "host_blocks": {"total": snapshot.num_host_blocks, "used": snapshot.num_used_host_blocks},
        "map": block_map(snapshot.block_states),
        "max_num_seqs": snapshot.max_num_seqs,
        "num_running": snapshot.num_running,
        "num_waiting": snapshot.num_waiting,
        "running": [_request(each) for each in snapshot.running],
        "waiting": [_request(each) for each in snapshot.waiting],
        "totals": {
            "finished": snapshot.num_finished,
            "prompt_tokens": snapshot.num_prompt_tokens,
            "generated_tokens": snapshot.num_generated_tokens,
            "prefix_queried_tokens": snapshot.num_queried_tokens,
            "prefix_hit_tokens": snapshot.num_hit_tokens,
            "copied_blocks": snapshot.num_copied_blocks,
            "swap_preemptions": snapshot.num_swap_preemptions,
            "recompute_preemptions": snapshot.num_recompute_preemptions,
        },
    }


def block_map(states: bytes) -> dict[str, Any]:
    """A letter a block, or for large pools how many of each cell's blocks are cached, used and shared."""
    blocks_per_cell = -(-len(states) // MAX_CELLS)
    if blocks_per_cell == 1:
        return {"blocks_per_cell": 1, "num_blocks": len(states), "states": states.translate(_LETTER_OF).decode()}
    counts = cell_counts(states, blocks_per_cell)
    shown = {state.name.lower(): counts[state] for state in (BlockState.CACHED, BlockState.USED, BlockState.SHARED)}
    return {"blocks_per_cell": blocks_per_cell, "num_blocks": len(states), **shown}


def runs(block_ids: Iterable[int]) -> list[list[int]]:
    """Neighbours that follow each other, as [first, how many]."""
    ids = list(block_ids)
    starts = [0, *(place for place, (one, two) in enumerate(pairwise(ids), 1) if two != one + 1), len(ids)]
    return [[ids[start], end - start] for start, end in pairwise(starts) if end > start]


def _request(request: RequestSnapshot) -> dict[str, Any]:
    name, _, sample = request.request_id.partition("/")
    return {
        "id": name[:ID_LENGTH] + (f"/{sample}" if sample else ""),
        "state": request.state,
        "prompt_tokens": request.num_prompt_tokens,
        "output_tokens": request.num_output_tokens,
        "computed_tokens": request.num_computed_tokens,
        "cached_tokens": request.num_cached_tokens,
        "preemptions": request.num_preemptions,
        "num_blocks": len(request.block_ids),
        "blocks": runs(request.block_ids),
        "age": round(request.age_s, 2),
    }


async def _events(server: ApiServer, view: LiveView) -> AsyncGenerator[dict[str, Any]]:
    """Pictures until the watcher leaves or the server has drained. A map that has not changed is not sent again."""
    model = {
        "name": server.model_names[0],
        "max_model_len": server.engine.max_model_len,
        "can_chat": server.chat.template(None) is not None,
    }
    sent = None
    while not (server.is_draining and server.num_in_flight == 0):
        latest = await view.next()
        event = {"model": model, "is_draining": server.is_draining} | latest
        if event["map"] == sent:
            del event["map"]
        else:
            sent = event["map"]
        yield event


def routes(server: ApiServer) -> list[Route]:
    """The stream of pictures, behind the same keys as ``/v1``."""
    view = LiveView(server.engine)

    async def live(request: Request) -> ASGIApp:
        if server.engine.is_dead:
            raise EngineDeadError
        return EventStream(_events(server, view))

    return [Route("/live", server.guarded(live))]
