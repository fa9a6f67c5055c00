"""``AsyncLLMEngine``: the engine in a thread of its own, requests and outputs through asyncio, with vLLM's names."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpage.config import EngineArgs
from jaxpage.engine.delivery import Outbox, Stream
from jaxpage.engine.front import Engine, Output
from jaxpage.engine.intake import Params, Prompt, salt_of
from jaxpage.engine.profiling import Profiler
from jaxpage.errors import EngineDeadError, ParameterError, shown
from jaxpage.metrics import EngineMetrics, StatusLine
from jaxpage.request import (
    BeamSearchParams,
    EmbeddingOutput,
    PoolingParams,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from jaxpage.scheduler.snapshot import EngineSnapshot, take_snapshot
from jaxpage.tokenizer import Tokenizer

logger = logging.getLogger("jaxpage")

STATUS_INTERVAL_S = 10.0
MAX_UNREAD_OUTPUTS = 4096
"""A stream whose reader is this many outputs behind is ended, so that a stalled client cannot fill the memory."""

Command = Callable[[], None]


class AsyncLLMEngine:
    """Generates for many concurrent callers.

    The engine's thread owns the engine; all others talk to it through a queue of commands.
    A fault in a step ends the requests that were running, is logged with its cause, and marks the engine dead.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}
        self._outbox = Outbox()
        self._profiler = Profiler()
        self._failure: BaseException | None = None
        self._stopping = False
        self._is_closed = False
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="jaxpage-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> AsyncLLMEngine:
        """Loads, compiles and warms up; blocks for seconds.

        Raises:
            ValueError, StartupError: in one line, for anything that keeps the engine from starting.
        """
        return cls(Engine(engine_args))

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    @property
    def model_name(self) -> str:
        """The name that lists and metrics show."""
        return self.model_names[0]

    @property
    def model_names(self) -> list[str]:
        """All names that clients may use."""
        return self._engine.args.model_names

    @property
    def metrics(self) -> EngineMetrics:
        """What the engine counts. Readable from any thread."""
        return self._engine.metrics

    @property
    def vocab_size(self) -> int:
        """Ids of the model are below this."""
        return self._engine.model.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._engine.config.max_model_len

    @property
    def max_logprobs(self) -> int:
        """The largest number of logprobs a request may ask for; -1 for the whole vocabulary."""
        return self._engine.args.max_logprobs

    @property
    def generation_config(self) -> dict[str, Any]:
        """The checkpoint's recommended sampling values."""
        return self._engine.generation_config

    @property
    def is_dead(self) -> bool:
        """True once a fault or ``shutdown`` has ended the engine's thread."""
        return self._failure is not None or not self._thread.is_alive()

    @property
    def is_running(self) -> bool:
        return not self.is_dead

    @property
    def errored(self) -> bool:
        return self._failure is not None

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._streams)

    async def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.tokenizer

    async def check_health(self) -> None:
        """Raises EngineDeadError if the engine no longer serves."""
        self._raise_if_dead()

    def check(
        self,
        prompt_token_ids: Sequence[int],
        params: Params,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Raises ParameterError if the engine cannot serve this; changes nothing. Callable from any thread."""
        self._engine.check(prompt_token_ids, params, priority, cache_salt)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | BeamSearchParams | None,
        request_id: str,
        *,
        cache_salt: str | None = None,
        lora_request: None = None,
        trace_headers: None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Yields outputs as they come; cumulative unless ``sampling_params.output_kind`` says otherwise.

        A beam search yields once, its beams best first. Leaving the iteration early aborts the request.
        ``sampling_params`` None takes the checkpoint's recommendation. The smaller ``priority``, the sooner served,
        under the priority policy. ``lora_request`` and ``trace_headers`` are there for callers that pass None.

        Raises:
            ParameterError: before the first output, for a bad prompt, parameter or an id in use.
            EngineDeadError: if the engine has ended.
        """
        self._raise_if_dead()
        for name, value in (("lora_request", lora_request), ("trace_headers", trace_headers)):
            if value:
                raise ParameterError(name, f"is not supported, got {shown(value)}")
        if not isinstance(request_id, str):
            raise ParameterError("request_id", f"must be a string, got {shown(request_id)}")
        if sampling_params is None:
            sampling_params = self._engine.default_sampling_params()
        async with contextlib.aclosing(
            self._outputs(prompt, sampling_params, request_id, cache_salt, priority)
        ) as outputs:
            async for output in outputs:
                yield output

    async def embed(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams,
        request_id: str,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> EmbeddingOutput:
        """The vector of a prompt; cancelling aborts the request. Errors as in ``generate``.

        Raises:
            ArithmeticError: if the vector is not finite.
        """
        self._raise_if_dead()
        async with contextlib.aclosing(
            self._outputs(prompt, pooling_params, request_id, cache_salt, priority)
        ) as outputs:
            output = await anext(outputs)
        if not np.isfinite(output.embedding).all():
            raise ArithmeticError("the prompt's hidden states are not finite")
        return output

    async def _outputs(
        self, prompt: Prompt, params: Params, request_id: str, cache_salt: str | None, priority: int
    ) -> AsyncGenerator[Any]:
        """The outputs of one request; it is aborted if the iteration ends before they do."""
        arrival_s = time.monotonic()
        loop = asyncio.get_running_loop()
        salt = salt_of(prompt) if cache_salt is None else cache_salt

        def prepare() -> tuple[str | None, list[int]]:
            text, token_ids = self._engine.tokenize(prompt)
            self._engine.check(token_ids, params, priority, salt)
            return text, token_ids

        # Tokenizing and compiling a grammar take a while: other streams go on meanwhile.
        text, token_ids = await loop.run_in_executor(None, prepare)
        are_deltas = isinstance(params, SamplingParams) and params.output_kind is RequestOutputKind.DELTA
        stream = Stream(loop, are_deltas)
        self._submit(lambda: self._add(stream, request_id, text, token_ids, params, salt, priority, arrival_s))
        try:
            while True:
                for output in await stream.take():
                    yield output
                    if output.finished:
                        return
        finally:
            stream.is_open = False
            with contextlib.suppress(EngineDeadError):
                self._submit(lambda: self._abort_stream(request_id, stream))

    async def abort(self, request_id: str | Sequence[str]) -> None:
        """Ends requests; their iterations get a last output with finish_reason "abort". Unknown ids are ignored."""
        for each in [request_id] if isinstance(request_id, str) else request_id:
            self._submit(lambda each=each: self._abort(each))

    async def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes that nobody uses."""
        self._submit(self._engine.core.scheduler.kv.reset_prefix_cache)

    async def start_profile(self, directory: Path) -> None:
        """Begins to record a JAX profile of this process, in a new folder under ``directory``.

        Raises:
            ParameterError: if one is being recorded.
        """
        await asyncio.get_running_loop().run_in_executor(None, self._profiler.start, directory)

    async def stop_profile(self) -> None:
        """Ends the profile and writes it, which takes seconds; the engine goes on meanwhile.

        Raises:
            ParameterError: if none is being recorded.
        """
        await asyncio.get_running_loop().run_in_executor(None, self._profiler.stop)

    async def snapshot(self) -> EngineSnapshot:
        """Who is there and the state of every block, between two steps. Costs the engine about 30 ns a block.

        Raises:
            EngineDeadError: if the engine has ended.
        """
        self._raise_if_dead()
        taken: concurrent.futures.Future[EngineSnapshot] = concurrent.futures.Future()
        self._submit(lambda: _resolve(taken, lambda: take_snapshot(self._engine.core.scheduler)))
        return await asyncio.wrap_future(taken)

    def shutdown(self, drain_timeout_s: float | None = None) -> None:
        """Ends the engine: lets running requests finish for up to ``drain_timeout_s`` seconds, then ends the rest."""
        deadline = time.monotonic() + (drain_timeout_s or 0.0)
        while drain_timeout_s and self._streams and not self.is_dead and time.monotonic() < deadline:
            time.sleep(0.02)
        self._stopping = True
        with contextlib.suppress(EngineDeadError):
            self._submit(lambda: None)
        self._thread.join()
        self._profiler.close()

    shutdown_background_loop = shutdown

    def _submit(self, command: Command) -> None:
        with self._closing:  # a command must not slip in after the thread has answered the last ones
            if self._is_closed:
                self._raise_if_dead()
            self._commands.put(command)

    def _raise_if_dead(self) -> None:
        if self.is_dead or self._is_closed:
            raise EngineDeadError(f"the engine has stopped: {self._failure or 'it was shut down'}") from self._failure

    # Everything below runs in the engine's thread.

    def _run(self) -> None:
        status = StatusLine(self.metrics, time.monotonic())
        try:
            while not self._stopping:
                self._run_commands(wait=not self._engine.has_work)
                if self._stopping or not self._engine.has_work:
                    continue
                for output in self._engine.step():
                    self._deliver(output)
                self._outbox.flush()
                if not self._engine.args.disable_log_stats and status.age_s(time.monotonic()) >= STATUS_INTERVAL_S:
                    text, figures = status.next(time.monotonic())
                    logger.info(text, extra=figures)
        except BaseException as error:
            logger.exception("the engine failed")
            self._failure = error
        finally:
            with self._closing:
                self._is_closed = True
            with contextlib.suppress(Exception):
                self._run_commands(wait=False)  # requests queued meanwhile get their stream, and so the reason
            reason = EngineDeadError(f"the engine has stopped: {self._failure or 'it was shut down'}")
            for stream in self._streams.values():
                self._outbox.put(stream, reason)
            self._streams.clear()
            self._outbox.flush()

    def _run_commands(self, wait: bool) -> None:
        if wait:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()
        self._outbox.flush()

    def _add(
        self,
        stream: Stream,
        request_id: str,
        text: str | None,
        token_ids: list[int],
        params: Params,
        cache_salt: str | None,
        priority: int,
        arrival_s: float,
    ) -> None:
        if not stream.is_open:
            return
        try:
            self._engine.add(
                request_id,
                token_ids,
                params,
                prompt=text,
                cache_salt=cache_salt,
                priority=priority,
                arrival_s=arrival_s,
            )
        except Exception as error:  # whatever is wrong with this request, the others go on
            self._outbox.put(stream, error)
            return
        self._streams[request_id] = stream
        if self._engine.args.enable_log_requests:
            named = {"request_id": request_id}
            logger.info("request %s: %d prompt tokens, %s", request_id, len(token_ids), params, extra=named)

    def _deliver(self, output: Output) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None:
            return
        if output.finished:
            del self._streams[output.request_id]
            if self._engine.args.enable_log_requests:
                reasons = (
                    [each.finish_reason for each in output.outputs] if isinstance(output, RequestOutput) else "pooled"
                )
                named = {"request_id": output.request_id}
                logger.info("request %s ended: %s", output.request_id, reasons, extra=named)
        elif stream.num_unread >= MAX_UNREAD_OUTPUTS:
            self._abort(output.request_id)
            return
        self._outbox.put(stream, output)

    def _abort(self, request_id: str) -> None:
        output = self._engine.abort(request_id)
        stream = self._streams.pop(request_id, None)
        if output is not None and stream is not None:
            self._outbox.put(stream, output)

    def _abort_stream(self, request_id: str, stream: Stream) -> None:
        # Only the stream's own request: the id may have been used again since.
        if self._streams.get(request_id) is stream:
            self._abort(request_id)


def _resolve(future: concurrent.futures.Future[Any], function: Callable[[], Any]) -> None:
    """Answers whoever waits for ``future``, if anybody still does; a fault is theirs, not the engine's."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)
