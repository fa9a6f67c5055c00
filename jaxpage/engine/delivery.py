"""Owns the way of outputs to those who read them: from the engine's thread to event loops, or to another process.

It must not know the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol

from jaxpage.request import CompletionOutput, EmbeddingOutput, RequestOutput

LOOP_SHARE = 0.06
"""Share of a processor that event loops may take for outputs before these wait for each other."""
MAX_DISTANCE_S = 0.1
"""No output waits longer, however busy its event loop is."""
LOST_S = 1.0
"""Time after which nobody waits any more to hear what a batch cost: its event loop may have come to its end."""
MAX_UNREAD_OUTPUTS = 4096
"""A stream whose reader is this many outputs behind is ended, so that a stalled client cannot fill the memory."""
Output = RequestOutput | EmbeddingOutput
Item = Output | BaseException
"""An exception is the last that comes."""


def is_last(item: Item) -> bool:
    """Whether nothing comes after it."""
    return isinstance(item, BaseException) or item.finished


class Recipient(Protocol):
    """Who gets the outputs of one request, as the engine's thread sees it.

    Attributes:
        is_open: somebody still reads.
        num_put: outputs that were sent there; counted by the engine's thread.
    """

    is_open: bool
    num_put: int

    @property
    def num_unread(self) -> int:
        """Outputs that the reader has not taken yet. Callable from any thread."""
        ...


class Stream:
    """The outputs of one request, read by one task of ``loop``; a ``Recipient``.

    Args:
        are_deltas: outputs hold what is new; those that wait for the reader are joined.
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

    def receive(self, items: list[Item]) -> None:
        """Hands in what comes next, on the event loop."""
        last = items[-1]
        if isinstance(last, BaseException):
            self._failure, items = last, items[:-1]
        self._unread += items
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class Mail(Protocol):
    """Where an engine's thread leaves outputs."""

    def put(self, recipient: Any, item: Item) -> None:
        """Adds the next output of ``recipient``."""
        ...

    def flush(self) -> None:
        """Sends what is due."""
        ...


Letters = dict[Any, list[Item]]
"""What each recipient gets, in order."""


class Bag:
    """What waits for one reader of many streams, such as an event loop.

    All outputs of a step go in one batch. A batch keeps its reader busy, and where that is an event loop beside the
    engine, it costs the engine processor time and Python's lock; so the next one waits until ``share`` of a processor
    is kept. With few streams that is never long. With hundreds of them several tokens then go out together. First and
    last outputs do not wait.

    Args:
        send: takes a batch; called with True it leads to a call of ``handed_out``. It returns False if the reader is
            gone.
        share: of a processor that the reader may take.
    """

    def __init__(self, send: Callable[[Letters, bool], bool], share: float) -> None:
        self.waiting: Letters = {}
        self._urgent: set[Any] = set()
        self._send = send
        self._share = share
        self._due_s = 0.0

    def put(self, recipient: Recipient, item: Item) -> None:
        """Adds the next output of ``recipient``."""
        if is_last(item) or recipient.num_put == 0:
            self._urgent.add(recipient)
        self.waiting.setdefault(recipient, []).append(item)
        recipient.num_put += 1

    def flush(self) -> bool:
        """Sends what is to be sent now; False if the reader is gone."""
        is_due = time.monotonic() >= self._due_s
        if is_due:
            letters, self.waiting = self.waiting, {}
        else:
            letters = {stream: self.waiting.pop(stream) for stream in self._urgent}
        self._urgent = set()
        if not letters:
            return True
        if is_due:
            self._due_s = time.monotonic() + LOST_S  # unless the reader says before what this batch cost
        return self._send(letters, is_due)

    def handed_out(self, cost_s: float) -> None:
        """The reader is through with a batch, for which it took ``cost_s`` seconds of a processor. From any thread."""
        self._due_s = time.monotonic() + min(cost_s / self._share, MAX_DISTANCE_S)


class Outbox:
    """Sends what steps give to the event loops, often enough for readers and seldom enough for the engine."""

    def __init__(self) -> None:
        self._bags: dict[asyncio.AbstractEventLoop, Bag] = {}

    def put(self, recipient: Stream, item: Item) -> None:
        """Adds the next output of a stream."""
        bag = self._bags.get(recipient.loop)
        if bag is None:
            bag = self._bags[recipient.loop] = self._new_bag(recipient.loop)
        bag.put(recipient, item)

    def flush(self) -> None:
        """Sends what is due, and all that is urgent."""
        for loop, bag in list(self._bags.items()):
            if not bag.flush():
                del self._bags[loop]

    def _new_bag(self, loop: asyncio.AbstractEventLoop) -> Bag:
        def send(letters: Letters, is_paced: bool) -> bool:
            return hand_out(loop, letters, bag.handed_out if is_paced else None)

        bag = Bag(send, LOOP_SHARE)
        return bag


def hand_out(loop: asyncio.AbstractEventLoop, letters: Letters, done: Callable[[float], None] | None = None) -> bool:
    """Gives ``letters`` to their streams on ``loop``, from any thread; False if the loop is gone.

    ``done`` is called once readers have seen to them, with the seconds of a processor that all of it took.
    """

    def deliver() -> None:
        began_s = time.thread_time()
        for stream, items in letters.items():
            stream.receive(items)
        if done is not None:
            # Readers wake up in the loop's next round; what comes up in the one after it is behind them.
            loop.call_soon(loop.call_soon, finish, done, began_s)

    def finish(done: Callable[[float], None], began_s: float) -> None:
        done(time.thread_time() - began_s)

    try:
        loop.call_soon_threadsafe(deliver)
    except RuntimeError:  # at shutdown: nobody reads any more
        return False
    return True


def joined(outputs: list[RequestOutput]) -> RequestOutput:
    """Outputs of kind DELTA that follow each other as one, for a reader who lags behind."""
    if len(outputs) == 1:
        return outputs[0]
    pieces: dict[int, list[CompletionOutput]] = {}
    prompt_logprobs = None
    for output in outputs:
        if output.prompt_logprobs is not None:
            prompt_logprobs = output.prompt_logprobs
        for piece in output.outputs:
            pieces.setdefault(piece.index, []).append(piece)
    last = outputs[-1]
    # dataclasses.replace would take most of the time, of which this is called for every frame of a stream.
    return RequestOutput(
        last.request_id,
        last.prompt,
        last.prompt_token_ids,
        [_joined_pieces(each) for each in pieces.values()],
        last.finished,
        prompt_logprobs,
        last.num_cached_tokens,
        last.metrics,
    )


def _joined_pieces(pieces: list[CompletionOutput]) -> CompletionOutput:
    last = pieces[-1]
    if len(pieces) == 1:
        return last
    return CompletionOutput(
        last.index,
        "".join([piece.text for piece in pieces]),
        [token_id for piece in pieces for token_id in piece.token_ids],
        last.cumulative_logprob,
        None if last.logprobs is None else [entry for piece in pieces for entry in piece.logprobs or ()],
        last.finish_reason,
        last.stop_reason,
        [offset for piece in pieces for offset in piece.text_offsets],
        last.score,
    )
