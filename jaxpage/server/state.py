"""Owns the state that the routes share: the engine, the limits, who may come in and what runs.

It must not know which routes there are or what they answer.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import Request

from jaxpage.errors import shown
from jaxpage.metrics import ServerMetrics
from jaxpage.params import BeamSearchParams, SamplingParams
from jaxpage.server.admission import Admission, Ticket
from jaxpage.server.chat_setup import ChatSetup
from jaxpage.server.errors import ApiError, unavailable
from jaxpage.server.fields import Limits
from jaxpage.server.json_body import check_content_type, parse_object, read_body
from jaxpage.server.options import ServerOptions
from jaxpage.server.prompts import PromptBuilder
from jaxpage.server.tracing import CallTrace, Tracer

FRONT_END_THREADS = 4
SMALL_BODY_BYTES = 64 * 1024
"""Bodies up to this size are checked on the event loop: a thread would cost more than it saves."""

Result = TypeVar("Result")
Handler = Callable[[Request], Awaitable[Any]]


class ApiServer:
    """The state behind the routes.

    Attributes:
        engine: an ``AsyncLLMEngine`` or anything with its methods.
        is_draining: new work is refused, what runs may end.
        num_in_flight: generating requests between their arrival and the last byte of their answer.
        chat: how the model chats.
        started_at: Unix time, in seconds.
        metrics: of the HTTP side.
        model_names: what clients may call the model; the first is the one that lists and metrics show.
    """

    def __init__(self, engine: Any, options: ServerOptions) -> None:
        self.engine = engine
        self.options = options
        self.is_draining = False
        self.num_in_flight = 0
        self.started_at = int(time.time())
        self.limits = Limits(
            vocab_size=engine.vocab_size,
            max_model_len=engine.max_model_len,
            max_logprobs=engine.max_logprobs,
            max_n=options.max_n,
            max_stop_strings=options.max_stop_strings,
            generation_config=dict(engine.generation_config),
        )
        self.chat = ChatSetup(engine.tokenizer, options)
        self.prompts = PromptBuilder(engine.tokenizer, engine.max_model_len, self.chat)
        self.model_names: tuple[str, ...] = tuple(engine.model_names)
        self.metrics = ServerMetrics()
        endpoint = options.otlp_traces_endpoint
        self._tracer = None if endpoint is None else Tracer(endpoint, self.model_names[0])
        self.admission = Admission(options.max_num_queued_reqs, options.max_num_queued_tokens, self.metrics.reject)
        self._api_keys = [key.encode() for key in options.api_key]
        self._threads = _front_end_threads()

    def close(self) -> None:
        """Ends the front end's threads; blocks while traces are sent."""
        threads, self._threads = self._threads, _front_end_threads()  # an app that is started again needs new ones
        threads.shutdown(wait=False, cancel_futures=True)
        if self._tracer is not None:
            self._tracer.close()

    def trace(self, http: Request, params: SamplingParams | BeamSearchParams) -> CallTrace | None:
        """Where the spans of the call ``http`` go; None if nobody traces."""
        return None if self._tracer is None else self._tracer.call(http.state.request_id, http.headers, params)

    def guarded(self, handler: Handler) -> Handler:
        """``handler`` behind the key check. For all of ``/v1/``, and for what strangers could do harm with."""

        async def check_then_handle(request: Request) -> Any:
            self._check_key(request)
            return await handler(request)

        return check_then_handle

    async def checked_body(self, http: Request, check: Callable[[dict[str, Any]], Result]) -> Result:
        """What ``check`` makes of the request's JSON object, away from the event loop if it is large.

        Raises:
            ApiError: 413 or 400 for a body that is too large or no JSON object.
        """
        raw = await read_body(http, self.options.max_body_bytes)
        check_content_type(http)
        if len(raw) <= SMALL_BODY_BYTES:
            return check(parse_object(raw))
        return await self.in_thread(lambda: check(parse_object(raw)))

    async def in_thread(self, function: Callable[[], Result]) -> Result:
        """The result of ``function``, which may take its time: it runs in the front end's threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    def check_model(self, name: str | None) -> str:
        """The name that the answer shows: ``name`` itself, or the first one for None.

        Raises:
            ApiError: 404 for a name that this server does not answer to.
        """
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            raise ApiError(404, f"the model {shown(name)} does not exist", "model")
        return name

    def admit(self, http: Request, num_samples: int, num_tokens: int) -> Ticket:
        """Lets the call ``http`` in until its answer ends. The last check: what it lets pass, the engine gets.

        Raises:
            ApiError: 503 if no new work is taken.
        """
        if self.is_draining:
            raise unavailable("the server is shutting down")
        self.check_alive()
        http.state.ticket = self.admission.enter(num_samples, num_tokens)
        return http.state.ticket

    def check_alive(self) -> None:
        """Raises ApiError 503 if the engine has stopped."""
        if self.engine.is_dead:
            raise ApiError(503, "the engine has stopped")

    def _check_key(self, request: Request) -> None:
        if not self._api_keys:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = key.strip().encode("latin-1")  # headers arrive decoded this way: these are the bytes sent
        # Every key is compared, so that the time taken says nothing.
        matches = [hmac.compare_digest(given, known) for known in self._api_keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError(401, "missing or wrong API key", headers={"WWW-Authenticate": "Bearer"})


def _front_end_threads() -> ThreadPoolExecutor:
    """A pool of its own: slow tokenizing may delay other tokenizing, never the engine or the event loop."""
    return ThreadPoolExecutor(FRONT_END_THREADS, thread_name_prefix="front-end")
