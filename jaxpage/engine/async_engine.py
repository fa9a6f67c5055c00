"""``AsyncLLMEngine``: engines that run by themselves, requests and outputs through asyncio, with vLLM's names."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpage.config import EngineArgs
from jaxpage.engine.delivery import Stream
from jaxpage.engine.intake import Params, Prompt, salt_of
from jaxpage.engine.replicas.data_parallel import EngineGroup, open_engines
from jaxpage.engine.replicas.replica import Job, Replica
from jaxpage.errors import EngineDeadError, ParameterError, shown
from jaxpage.metrics import EngineMetrics
from jaxpage.params import BeamSearchParams, PoolingParams, RequestOutputKind, SamplingParams
from jaxpage.request import EmbeddingOutput, RequestOutput
from jaxpage.scheduler.snapshot import EngineSnapshot
from jaxpage.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxpage.engine.front import Engine

LIGHT_PROMPT_TOKENS = 1024
"""Ids that are checked in some ten microseconds."""


class AsyncLLMEngine:
    """Generates for many concurrent callers, with one engine or several (see ``EngineGroup``).

    A fault that an engine does not recover from ends the requests that it was running. With several the others go on;
    once none is left, the whole is dead.

    Attributes:
        group: the engines.
    """

    def __init__(self, engine: Engine | EngineGroup) -> None:
        """``engine``: a loaded one, which gets a thread of its own, or a group."""
        self.group = engine if isinstance(engine, EngineGroup) else EngineGroup.of_one(engine)
        self._running: dict[str, tuple[Stream, Replica]] = {}
        self._lock = threading.Lock()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> AsyncLLMEngine:
        """Loads, compiles and warms up as many engines as ``data_parallel_size`` says; blocks for seconds.

        Raises:
            ValueError, OSError, StartupError: in one line, for anything that keeps an engine from starting.
        """
        return cls(open_engines(engine_args))

    @property
    def tokenizer(self) -> Tokenizer:
        return self.group.intake.tokenizer

    @property
    def model_name(self) -> str:
        """The name that lists and metrics show."""
        return self.model_names[0]

    @property
    def model_names(self) -> list[str]:
        """All names that clients may use."""
        return self.group.args.model_names

    @property
    def metrics(self) -> EngineMetrics:
        """What the first engine counts, which may be the only one. Readable from any thread."""
        return self.group.metrics[0]

    @property
    def all_metrics(self) -> list[EngineMetrics]:
        """What each engine counts. Readable from any thread."""
        return self.group.metrics

    @property
    def vocab_size(self) -> int:
        """Ids of the model are below this."""
        return self.group.intake.facts.vocab_size

    @property
    def max_model_len(self) -> int:
        return self.group.intake.facts.config.max_model_len

    @property
    def max_logprobs(self) -> int:
        """The largest number of logprobs a request may ask for; -1 for the whole vocabulary."""
        return self.group.intake.facts.max_logprobs

    @property
    def generation_config(self) -> dict[str, Any]:
        """The checkpoint's recommended sampling values."""
        return self.group.intake.facts.generation_config

    @property
    def is_dead(self) -> bool:
        """True while no engine serves, because of a fault or after ``shutdown``."""
        return self.group.is_dead

    @property
    def is_running(self) -> bool:
        return not self.is_dead

    @property
    def errored(self) -> bool:
        return self.group.failure is not None

    @property
    def num_unfinished_requests(self) -> int:
        return self.group.num_unfinished

    async def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.tokenizer

    async def check_health(self) -> None:
        """Raises EngineDeadError if no engine serves."""
        self.group.raise_if_dead()

    def check(
        self,
        prompt_token_ids: Sequence[int],
        params: Params,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Raises ParameterError if the engine cannot serve this; changes nothing. Callable from any thread."""
        self.group.intake.check(prompt_token_ids, params, priority, cache_salt)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | BeamSearchParams | None,
        request_id: str,
        *,
        cache_salt: str | None = None,
        lora_request: None = None,
        trace_headers: None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput]:
        """Yields outputs as they come; cumulative unless ``sampling_params.output_kind`` says otherwise.

        A beam search yields once, its beams best first. Leaving the iteration early aborts the request.
        ``sampling_params`` None takes the checkpoint's recommendation. The smaller ``priority``, the sooner served,
        under the priority policy. ``lora_request`` and ``trace_headers`` are there for callers that pass None.

        Raises:
            ParameterError: before the first output, for a bad prompt, parameter or an id in use.
            EngineDeadError: if the engine that served it has ended, or none is left.
        """
        for name, value in (("lora_request", lora_request), ("trace_headers", trace_headers)):
            if value:
                raise ParameterError(name, f"is not supported, got {shown(value)}")
        if sampling_params is None:
            sampling_params = self.group.intake.default_sampling_params()
        return self.outputs(prompt, sampling_params, request_id, cache_salt, priority)

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
        async with contextlib.aclosing(
            self.outputs(prompt, pooling_params, request_id, cache_salt, priority)
        ) as outputs:
            output = await anext(outputs)
        if not np.isfinite(output.embedding).all():
            raise ArithmeticError("the prompt's hidden states are not finite")
        return output

    async def outputs(
        self, prompt: Prompt, params: Params, request_id: str, cache_salt: str | None = None, priority: int = 0
    ) -> AsyncGenerator[Any]:
        """The outputs of one request of any kind; it is aborted if the iteration ends before they do.

        Raises:
            ParameterError, EngineDeadError: as in ``generate``.
        """
        self.group.raise_if_dead()
        if not isinstance(request_id, str):
            raise ParameterError("request_id", f"must be a string, got {shown(request_id)}")
        arrival_s = time.monotonic()
        loop = asyncio.get_running_loop()
        salt = salt_of(prompt) if cache_salt is None else cache_salt
        group = self.group

        def prepare() -> tuple[str | None, list[int], list[bytes]]:
            text, token_ids = group.intake.tokenize(prompt)
            group.intake.check(token_ids, params, priority, salt)
            return text, token_ids, group.names(token_ids, salt)

        # Tokenizing and compiling a grammar take a while: other streams go on meanwhile.
        text, token_ids, names = prepare() if _is_light(prompt, params) else await loop.run_in_executor(None, prepare)
        job = Job(request_id, text, token_ids, group.seeded(params), salt, priority, arrival_s)
        are_deltas = isinstance(params, SamplingParams) and params.output_kind is RequestOutputKind.DELTA
        stream = Stream(loop, are_deltas)
        with contextlib.ExitStack() as claim:
            engine = self._start(stream, job, names, claim)
            try:
                while True:
                    for output in await stream.take():
                        yield output
                        if output.finished:
                            return
            finally:
                stream.is_open = False
                with self._lock:
                    del self._running[request_id]
                with contextlib.suppress(EngineDeadError):
                    engine.leave(stream, request_id)

    def _start(self, stream: Stream, job: Job, names: Sequence[bytes], claim: contextlib.ExitStack) -> Replica:
        """Hands a job to an engine, which counts as busy with it as long as ``claim`` lasts."""
        while True:
            with contextlib.ExitStack() as attempt:
                engine = attempt.enter_context(self.group.claimed(names, len(job.token_ids), job.params))
                with self._lock:
                    if job.request_id in self._running:
                        raise ParameterError("request_id", f"{shown(job.request_id)} is in use")
                    self._running[job.request_id] = stream, engine
                try:
                    engine.add(stream, job)
                except BaseException as error:
                    with self._lock:
                        del self._running[job.request_id]
                    if not isinstance(error, EngineDeadError):
                        raise
                    continue  # it has just died and did not get the job, so another may
                claim.enter_context(attempt.pop_all())
                return engine

    async def abort(self, request_id: str | Sequence[str]) -> None:
        """Ends requests; their iterations get a last output with finish_reason "abort". Unknown ids are ignored."""
        self.group.raise_if_dead()
        for each in [request_id] if isinstance(request_id, str) else request_id:
            with self._lock:
                running = self._running.get(each)
            if running is not None:
                with contextlib.suppress(EngineDeadError):  # then its stream has ended already
                    running[1].abort(each)

    async def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes that nobody uses."""
        self.group.reset_prefix_cache()

    async def start_profile(self, directory: Path) -> None:
        """Begins to record a JAX profile of each engine's process, in a new folder under ``directory``.

        Raises:
            ParameterError: if one is being recorded.
        """
        await asyncio.get_running_loop().run_in_executor(None, self.group.start_profile, directory)

    async def stop_profile(self) -> None:
        """Ends the profile and writes it, which takes seconds; the engine goes on meanwhile.

        Raises:
            ParameterError: if none is being recorded.
        """
        await asyncio.get_running_loop().run_in_executor(None, self.group.stop_profile)

    async def snapshot(self) -> EngineSnapshot:
        """Who is there and the state of every block, between two steps. Costs the engine about 30 ns a block.

        Raises:
            EngineDeadError: if no engine serves.
        """
        return await self.group.snapshot()

    def shutdown(self, drain_timeout_s: float | None = None) -> None:
        """Ends the engine: lets running requests finish for up to ``drain_timeout_s`` seconds, then ends the rest."""
        self.group.shutdown(drain_timeout_s)

    shutdown_background_loop = shutdown


def _is_light(prompt: Prompt, params: Params) -> bool:
    """True if nothing is to be tokenized or compiled: a thread would cost more, and wait for Python's lock twice."""
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
    is_free = not isinstance(params, SamplingParams) or not (params.structured_outputs or params.bad_words)
    return is_free and isinstance(ids, list) and len(ids) <= LIGHT_PROMPT_TOKENS
