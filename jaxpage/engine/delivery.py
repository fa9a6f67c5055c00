"""Owns the way of outputs from the engine's thread to the event loops that read them.

It must not know the engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from typing import Any

from jaxpage.request import CompletionOutput, EmbeddingOutput, RequestOutput

LOOP_SHARE = 0.1
"""Share of a processor that event loops may take for outputs before these wait for each other."""
MAX_DISTANCE_S = 0.1
"""No output waits longer, however busy its event loop is."""
Output = RequestOutput | EmbeddingOutput
Item = Output | BaseException
"""An exception is the last that comes."""


class Stream:
    """The outputs of one request, read by one task of ``loop``.

    Args:
        are_deltas: outputs hold what is new; those that wait for the reader are joined.

    Attributes:
        is_open: somebody still reads.
        num_put: outputs that were sent here; counted by the engine's thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, are_deltas: bool) -> None:
        self.loop = loop
        self.is_open = True
        self.num_put = 0
        self._num_taken = 0
        self._are_deltas = are_deltas
        self._unread: list[Any] = []
        self._failure: BaseException | None = None
        self._reader: asyncio.Future[None] | None = None

    @property
    def num_unread(self) -> int:
        """Outputs that the reader has not taken yet. Callable from any thread."""
        return self.num_put - self._num_taken

    async def take(self) -> list[Any]:
        """Everything that has come since the last call; waits until there is something.

        Raises:
            BaseException: what ended the request, once all outputs before it are taken.
        """
        while not self._unread:
            if self._failure is not None:
                raise self._failure
            self._reader = self.loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        taken, self._unread = self._unread, []
        self._num_taken += len(taken)
        return [joined(taken)] if self._are_deltas else taken

    def receive(self, item: Item) -> None:
        """Hands in what comes next, on the event loop."""
        if isinstance(item, BaseException):
            self._failure = item
        else:
            self._unread.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class Outbox:
    """Sends what steps give to the event loops, often enough for readers and seldom enough for the engine.

    All outputs of a step go in one batch. A batch keeps its event loop busy, and that costs the engine processor time
    and Python's lock; so the next one waits until ``LOOP_SHARE`` is kept. With few streams that is never long. With
    hundreds of them several tokens then go out together. First and last outputs do not wait.
    """

    def __init__(self) -> None:
        self._bags: dict[asyncio.AbstractEventLoop, _Bag] = {}

    def put(self, stream: Stream, item: Item) -> None:
        """Adds the next output of ``stream``."""
        bag = self._bags.get(stream.loop)
        if bag is None:
            bag = self._bags[stream.loop] = _Bag(stream.loop)
        is_last = isinstance(item, BaseException) or item.finished
        if is_last or stream.num_put == 0:
            bag.urgent.add(stream)
        bag.waiting.setdefault(stream, []).append(item)
        stream.num_put += 1

    def flush(self) -> None:
        """Sends what is due, and all that is urgent."""
        for loop, bag in list(self._bags.items()):
            if not bag.flush():
                del self._bags[loop]


class _Bag:
    """What waits for one event loop.

    Attributes:
        urgent: streams whose outputs must not wait.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.waiting: dict[Stream, list[Item]] = {}
        self.urgent: set[Stream] = set()
        self._loop = loop
        self._due_s = 0.0

    def flush(self) -> bool:
        """Sends what is to be sent now; False if the loop is gone."""
        is_due = time.monotonic() >= self._due_s
        if is_due:
            letters, self.waiting = self.waiting, {}
        else:
            letters = {stream: self.waiting.pop(stream) for stream in self.urgent}
        self.urgent = set()
        if not letters:
            return True
        if is_due:
            self._due_s = math.inf  # until the loop says what this batch cost
        try:
            self._loop.call_soon_threadsafe(self._hand_out, letters, is_due)
        except RuntimeError:  # at shutdown: nobody reads any more
            return False
        return True

    def _hand_out(self, letters: dict[Stream, list[Item]], is_paced: bool) -> None:
        began_s = time.thread_time()
        for stream, items in letters.items():
            for item in items:
                stream.receive(item)
        if is_paced:
            # Readers wake up in the loop's next round; what comes up in the one after it is behind them.
            self._loop.call_soon(self._loop.call_soon, self._pace, began_s)

    def _pace(self, began_s: float) -> None:
        self._due_s = time.monotonic() + min((time.thread_time() - began_s) / LOOP_SHARE, MAX_DISTANCE_S)


def joined(outputs: list[RequestOutput]) -> RequestOutput:
    """Outputs of kind DELTA that follow each other as one, for a reader who lags behind."""
    if len(outputs) == 1:
        return outputs[0]
    pieces: dict[int, list[CompletionOutput]] = {}
    for output in outputs:
        for piece in output.outputs:
            pieces.setdefault(piece.index, []).append(piece)
    return dataclasses.replace(
        outputs[-1],
        outputs=[_joined_pieces(each) for each in pieces.values()],
        prompt_logprobs=next((each.prompt_logprobs for each in outputs if each.prompt_logprobs is not None), None),
    )


def _joined_pieces(pieces: list[CompletionOutput]) -> CompletionOutput:
    last = pieces[-1]
    if len(pieces) == 1:
        return last
    return dataclasses.replace(
        last,
        text="".join([piece.text for piece in pieces]),
        token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
        logprobs=None if last.logprobs is None else [entry for piece in pieces for entry in piece.logprobs or ()],
        text_offsets=[offset for piece in pieces for offset in piece.text_offsets],
    )
