"""``AsyncLLMEngine``: the engine in a thread of its own, requests and outputs through asyncio, with vLLM's names."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from jaxpage.config import EngineArgs
from jaxpage.engine.front import Engine, Prompt, salt_of
from jaxpage.errors import EngineDeadError, ParameterError, shown
from jaxpage.request import BeamSearchParams, RequestOutput, SamplingParams
from jaxpage.tokenizer import Tokenizer

logger = logging.getLogger("jaxpage")

STATUS_INTERVAL_S = 10.0
MAX_UNREAD_OUTPUTS = 4096
"""A stream whose reader is this many outputs behind is ended, so that a stalled client cannot fill the memory."""

Item = RequestOutput | BaseException
Command = Callable[[], None]


@dataclasses.dataclass(slots=True, eq=False)
class _Stream:
    """The way of one request's outputs from the engine's thread to the event loop that reads them."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[Item]
    is_open: bool = True

    def put(self, item: Item) -> None:
        # The loop may be gone at shutdown; then nobody reads.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.queue.put_nowait, item)


class AsyncLLMEngine:
    """Generates for many concurrent callers.

    The engine's thread owns the engine; all others talk to it through a queue of commands.
    A fault in a step ends the requests that were running, is logged with its cause, and marks the engine dead.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
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
        """The name clients use."""
        return self._engine.args.served_model_name or self._engine.args.model

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
        sampling_params: SamplingParams | BeamSearchParams,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Raises ParameterError if the engine cannot serve this; changes nothing. Callable from any thread."""
        self._engine.check(prompt_token_ids, sampling_params, priority, cache_salt)

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
        loop = asyncio.get_running_loop()
        text, token_ids = await loop.run_in_executor(None, self._engine.tokenize, prompt)
        salt = salt_of(prompt) if cache_salt is None else cache_salt
        self._engine.check(token_ids, sampling_params, priority, salt)
        stream = _Stream(loop, asyncio.Queue())
        self._submit(lambda: self._add(stream, request_id, text, token_ids, sampling_params, salt, priority))
        try:
            while True:
                item = await stream.queue.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
                if item.finished:
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

    def shutdown(self, drain_timeout_s: float | None = None) -> None:
        """Ends the engine: lets running requests finish for up to ``drain_timeout_s`` seconds, then ends the rest."""
        deadline = time.monotonic() + (drain_timeout_s or 0.0)
        while drain_timeout_s and self._streams and not self.is_dead and time.monotonic() < deadline:
            time.sleep(0.02)
        self._stopping = True
        with contextlib.suppress(EngineDeadError):
            self._submit(lambda: None)
        self._thread.join()

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
        status = _StatusLine(self._engine)
        try:
            while not self._stopping:
                self._run_commands(wait=not self._engine.has_work)
                if self._stopping or not self._engine.has_work:
                    continue
                for output in self._engine.step():
                    self._deliver(output)
                if not self._engine.args.disable_log_stats:
                    status.maybe_log()
        except BaseException as error:
            logger.exception("the engine failed")
            self._failure = error
        finally:
            with self._closing:
                self._is_closed = True
            with contextlib.suppress(Exception):
                self._run_commands(wait=False)  # requests queued meanwhile get their stream, and so the reason
            reason = EngineDeadError(f"the engine has stopped: {self._failure or 'it was shut down'}")
            for stream in list(self._streams.values()):
                stream.put(reason)
            self._streams.clear()

    def _run_commands(self, wait: bool) -> None:
        if wait:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()

    def _add(
        self,
        stream: _Stream,
        request_id: str,
        text: str | None,
        token_ids: list[int],
        params: SamplingParams | BeamSearchParams,
        cache_salt: str | None,
        priority: int,
    ) -> None:
        if not stream.is_open:
            return
        try:
            self._engine.add(request_id, token_ids, params, prompt=text, cache_salt=cache_salt, priority=priority)
        except Exception as error:  # whatever is wrong with this request, the others go on
            stream.put(error)
            return
        self._streams[request_id] = stream
        if self._engine.args.enable_log_requests:
            logger.info("request %s: %d prompt tokens, %s", request_id, len(token_ids), params)

    def _deliver(self, output: RequestOutput) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None:
            return
        if output.finished:
            del self._streams[output.request_id]
            if self._engine.args.enable_log_requests:
                logger.info("request %s ended: %s", output.request_id, [o.finish_reason for o in output.outputs])
        elif stream.queue.qsize() >= MAX_UNREAD_OUTPUTS:
            self._abort(output.request_id)
            return
        stream.put(output)

    def _abort(self, request_id: str) -> None:
        output = self._engine.abort(request_id)
        stream = self._streams.pop(request_id, None)
        if output is not None and stream is not None:
            stream.put(output)

    def _abort_stream(self, request_id: str, stream: _Stream) -> None:
        # Only the stream's own request: the id may have been used again since.
        if self._streams.get(request_id) is stream:
            self._abort(request_id)


class _StatusLine:
    """One log line every few seconds while there is work."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._last_s = time.monotonic()
        self._last_tokens = 0

    def maybe_log(self) -> None:
        now = time.monotonic()
        if now - self._last_s < STATUS_INTERVAL_S:
            return
        scheduler = self._engine.core.scheduler
        pool, counters, stats = scheduler.kv.pool, scheduler.kv.counters, scheduler.stats
        logger.info(
            "running %d, waiting %d, KV blocks in use %.0f%%, prefix hits %.0f%% of prompt tokens, preempted %d, "
            "%.1f tokens/s",
            len(scheduler.running),
            scheduler.num_waiting,
            100 * pool.num_used / pool.num_usable,
            100 * counters.num_hit_tokens / max(1, counters.num_queried_tokens),
            stats.num_preemptions,
            (stats.num_generated_tokens - self._last_tokens) / (now - self._last_s),
        )
        self._last_s, self._last_tokens = now, stats.num_generated_tokens
