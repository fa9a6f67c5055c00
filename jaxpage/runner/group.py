"""A worker on several hosts: the leader's sends every command to the others, whose workers obey the same.

Before the host half of the leader sees a step's tokens, all processes have said that they were told and sampled the
same. So a process that went astray ends the job, and gives no wrong token.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import signal
import struct
import threading
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxpage.batch import StepOutput
from jaxpage.parallel.hosts import Followers, LostHostError, call_leader
from jaxpage.runner.commands import NO_BATCH, Command
from jaxpage.runner.pipeline import Results
from jaxpage.runner.wire import pack_command, unpack_command
from jaxpage.runner.worker import Worker

logger = logging.getLogger("jaxpage")

GOODBYE = b""
ANSWER = struct.Struct("<qIII")
"""Of a step: call, and the digests that ``digests_of`` makes."""
UNKNOWN = 0
"""In place of a digest that a process cannot make."""
HEARSAY_S = 2.0
"""From the failure of what hosts compute together to the end of the line of the one that is gone."""
LAST_WORDS_S = 5.0
"""From the loss of a host to the end of the process, which may be stuck in a computation with that host."""


class Leader:
    """Process 0 as the others know it. Made before anything long begins, so that a host that fails is noticed at once.

    Attributes:
        on_loss: called in some thread when the job is over because of another host; the process ends soon after.
    """

    def __init__(self) -> None:
        """Waits for the others; raises StartupError if one does not come."""
        self.on_loss: Callable[[str], None] = lambda reason: None
        self._changed = threading.Condition()
        self._digests: dict[int, int] = {}
        self._answers: dict[int, dict[int, tuple[int, ...]]] = {}
        self._loss: str | None = None
        self._followers = Followers(self._hear, self.lose)
        atexit.register(self.close)

    def tell(self, command: Command) -> None:
        """Sends a command to all."""
        data = pack_command(command)
        if command.num_tokens:
            self._digests[command.call] = zlib.crc32(data)
        self._followers.send(data)

    def confirm(self, call: int, output: StepOutput) -> None:
        """Waits until every follower has said the same of a step.

        Raises:
            LostHostError: if one says something else, or is gone.
        """
        own = digests_of(self._digests.pop(call), output)
        with self._changed:
            self._changed.wait_for(
                lambda: self._loss is not None or len(self._answers.get(call, ())) == len(self._followers.ids)
            )
            answers = self._answers.pop(call, {})
            if self._loss is not None:
                raise LostHostError(self._loss)
        known = [
            {digest for digest in digests if digest != UNKNOWN} for digests in zip(own, *answers.values(), strict=True)
        ]
        astray = [
            process_id
            for process_id, answer in sorted(answers.items())
            if any(len(digests) > 1 and mine != UNKNOWN for digests, mine in zip(known, answer, strict=True))
        ]
        if astray:
            reason = f"host {astray[0]} has not computed in step {call} what this one has"
            self.lose(reason)
            raise LostHostError(reason)

    def close(self) -> None:
        """Sends the others home."""
        self._followers.part(GOODBYE)

    def give_up(self) -> None:
        """This process cannot go on: the others see the end of their lines, and end."""
        self._followers.close()

    def explain(self, reason: str) -> str:
        """Ends the job because of a failure here; gives the reason, or that of a host whose loss led to the failure."""
        with self._changed:  # the end of its line may be heard of a little later
            self._changed.wait_for(lambda: self._loss is not None, HEARSAY_S)
        self.lose(reason)
        return self._loss or reason

    def lose(self, reason: str) -> None:
        """The job is over, for this reason."""
        with self._changed:
            if self._loss is not None:
                return
            self._loss = reason
            self._changed.notify_all()
        logger.error("%s: the job ends", reason)
        self._followers.close()  # the others see the end of their line, and end too
        timer = threading.Timer(LAST_WORDS_S, os._exit, (1,))
        timer.daemon = True
        timer.start()
        self.on_loss(reason)

    def _hear(self, process_id: int, data: bytes) -> None:
        call, *digests = ANSWER.unpack(data)
        with self._changed:
            self._answers.setdefault(call, {})[process_id] = tuple(digests)
            self._changed.notify_all()


class LeadingWorker(Worker):
    """The worker of process 0: the others obey what it obeys."""

    def __init__(self, leader: Leader, *arguments: Any) -> None:
        self.leader = leader
        super().__init__(*arguments)

    def obey(self, command: Command) -> Results | None:
        self.leader.tell(command)
        try:
            return super().obey(command)
        except Exception as error:  # the others wait in this step for this process
            reason = str(error).splitlines()[0][:200] if str(error) else repr(error)
            raise LostHostError(self.leader.explain(f"step {command.call} failed here: {reason}")) from error
        except BaseException:
            self.leader.lose(f"step {command.call} was interrupted")
            raise

    def bring_back(self, call: int) -> None:
        if self.pipeline.owes(call):
            self.obey(Command(call, [], [], {}, 0, NO_BATCH))  # all processes of the first stage at the same point

    def confirm(self, call: int, output: StepOutput) -> None:
        self.leader.confirm(call, output)

    def start_over(self) -> None:
        raise LostHostError(self.leader.explain("a step failed here, and what several hosts hold cannot be made anew"))

    def notify_of_loss(self, callback: Callable[[str], None]) -> None:
        self.leader.on_loss = callback


class Follower:
    """A process that obeys. Listens from the start, so that it ends with the leader whatever it is doing then."""

    def __init__(self) -> None:
        """Calls the leader; raises StartupError if it is not reached."""
        self._line = call_leader()
        self._commands: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[int, int, Results | None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._receive, name="jaxpage-leader", daemon=True).start()

    def follow(self, worker: Worker) -> None:
        """Obeys the leader until it says goodbye.

        A leader that is gone, or a fault here, ends the process at once, with a message: who waits for it hears of
        that. Signals are the leader's: launchers send them to all, and the others end with it.
        """
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
        answering = threading.Thread(target=self._answer, name="jaxpage-answers", daemon=True)
        answering.start()
        try:
            while (data := self._commands.get()) != GOODBYE:
                command = unpack_command(data)
                results = worker.obey(command)
                if command.num_tokens:
                    self._answers.put((command.call, zlib.crc32(data), results))
        except Exception:
            logger.exception("a step failed")
            os._exit(1)
        self._answers.put(None)
        answering.join()
        self._line.close()

    def give_up(self) -> None:
        """This process cannot go on: the leader sees the end of its line."""
        self._line.close()

    def _receive(self) -> None:
        try:
            while True:
                data = self._line.receive()
                self._commands.put(data)
                if data == GOODBYE:
                    return
        except (EOFError, OSError) as error:
            # The other threads may be stuck in a computation with a host that is gone.
            logger.error("the leading host has ended the job or is gone (%s)", error)
            os._exit(1)

    def _answer(self) -> None:
        """Sends digests of each step as soon as its tokens are there."""
        try:
            while (item := self._answers.get()) is not None:
                call, command_digest, results = item
                output = None if results is None else results.result()
                self._line.send(ANSWER.pack(call, *digests_of(command_digest, output)))
        except OSError:
            pass  # the thread that receives sees the end too
        except Exception:
            logger.exception("a step failed")
            os._exit(1)


def digests_of(command_digest: int, output: StepOutput | None) -> tuple[int, int, int]:
    """Of a step: of what a process was told, of what it sampled, and of the hidden states that led to that.

    Processes that agree in all they know computed the same. Tokens alone would not tell: in a step that devices share,
    a state gone wrong on one of them spoils the tokens of all alike.
    """
    if output is None:
        return command_digest, UNKNOWN, UNKNOWN
    sampled = _digest(np.asarray(output.token_ids))
    if output.fingerprint is None:
        return command_digest, sampled, UNKNOWN
    parts = [np.asarray(part.data) for part in output.fingerprint.addressable_shards]
    is_one = all((part == parts[0]).all() for part in parts)
    return command_digest, sampled, _digest(parts[0] if is_one else np.concatenate(parts))


def _digest(array: np.ndarray) -> int:
    """Never UNKNOWN."""
    return zlib.crc32(np.ascontiguousarray(array, np.int32).tobytes()) or 1
