"""Owns the routes, the order of checks and the state of the server; the app runs on any ASGI server.

It must not know how answers are built, or how the engine works inside.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import jaxpage
from jaxpage.errors import ParameterError, shown
from jaxpage.server.errors import ApiError, ClientGoneError, error_response, to_api_error, unavailable
from jaxpage.server.fields import Limits
from jaxpage.server.formats import ChatFormat, CompletionFormat
from jaxpage.server.generation import Generation, coalesced
from jaxpage.server.json_body import check_content_type, parse_object, read_body
from jaxpage.server.prompts import PreparedPrompt, PromptBuilder
from jaxpage.server.protocol import REQUEST_ID, GenerationRequest, chat_request, completion_request
from jaxpage.server.streaming import EventStream, while_connected
from jaxpage.server.tokenizing import detokenize, tokenize, tokenizer_info

DEFAULT_MAX_BODY_BYTES = 32 * 1024 * 1024
TOKENIZER_THREADS = 4
SMALL_BODY_BYTES = 64 * 1024
"""Bodies up to this size are checked on the event loop: a thread would cost more than it saves."""

Result = TypeVar("Result")
Handler = Callable[[Request], Awaitable[Any]]


class ApiServer:
    """The state behind the routes.

    Attributes:
        is_draining: new work is refused, what runs may end.
        num_in_flight: generating requests between their arrival and the last byte of their answer.
    """

    def __init__(self, engine: Any, api_keys: Sequence[str], max_body_bytes: int) -> None:
        self.engine = engine
        self.is_draining = False
        self.num_in_flight = 0
        self._api_keys = [key.encode() for key in api_keys]
        self._max_body_bytes = max_body_bytes
        self._started_at = int(time.time())
        self._limits = Limits(
            vocab_size=engine.vocab_size,
            max_model_len=engine.max_model_len,
            max_logprobs=engine.max_logprobs,
            generation_config=dict(engine.generation_config),
        )
        self._prompts = PromptBuilder(engine.tokenizer, engine.max_model_len)
        # A pool of its own: slow tokenizing may delay other tokenizing, never the engine or the event loop.
        self._threads = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenize")

    def close(self) -> None:
        """Ends the tokenizing threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def completions(self, request: Request) -> ASGIApp:
        """POST /v1/completions."""

        def prepare(body: dict[str, Any]) -> Any:
            return completion_request(body, self._limits)

        return await self._generate(request, prepare, self._prompts.completion, CompletionFormat)

    async def chat_completions(self, request: Request) -> ASGIApp:
        """POST /v1/chat/completions."""

        def prepare(body: dict[str, Any]) -> Any:
            return chat_request(body, self._limits)

        return await self._generate(request, prepare, lambda wanted: [self._prompts.chat(wanted)], ChatFormat)

    async def _generate(
        self,
        http: Request,
        check: Callable[[dict[str, Any]], GenerationRequest],
        build_prompts: Callable[[Any], list[PreparedPrompt]],
        answer_format: type[CompletionFormat],
    ) -> ASGIApp:
        """All checks, then the answer: whole, or as a stream whose events start with the response."""
        wanted = await self._checked_body(http, check)
        if wanted.request_id is not None and not http.state.has_client_id:
            http.state.request_id = wanted.request_id
        self._check_model(wanted.model)

        def prepare() -> list[PreparedPrompt]:
            prompts = build_prompts(wanted)
            for prompt in prompts:
                self._check_prompt(prompt, wanted)
            return prompts

        prompts = await self._in_thread(prepare)
        self._check_admission()
        generation = Generation(self.engine, prompts, wanted)
        shape = answer_format(self.engine.tokenizer, wanted, self.engine.model_name, http.state.request_id)
        if wanted.stream:
            return EventStream(_events(generation, shape))
        choices = await while_connected(http.receive, generation.choices())
        # Score lists may be large; a short answer is not worth a thread.
        if wanted.num_logprobs is None and wanted.num_prompt_logprobs is None:
            return JSONResponse(shape.whole(generation, choices))
        return await self._in_thread(lambda: JSONResponse(shape.whole(generation, choices)))

    async def reset_prefix_cache(self, request: Request) -> ASGIApp:
        """POST /reset_prefix_cache, /flush_cache. Requests keep what they hold; later ones find nothing older."""
        await self.engine.reset_prefix_cache()
        return Response(status_code=200)

    async def tokenize(self, request: Request) -> ASGIApp:
        """POST /tokenize."""
        return JSONResponse(await self._with_tokenizer(request, tokenize))

    async def detokenize(self, request: Request) -> ASGIApp:
        """POST /detokenize."""
        return JSONResponse(await self._with_tokenizer(request, detokenize))

    async def tokenizer_info(self, request: Request) -> ASGIApp:
        """GET /tokenizer_info."""
        return JSONResponse(tokenizer_info(self.engine.tokenizer))

    async def models(self, request: Request) -> ASGIApp:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> ASGIApp:
        """GET /v1/models/{id}."""
        self._check_model(request.path_params["model_id"])
        return JSONResponse(self._model_card())

    async def health(self, request: Request) -> ASGIApp:
        """GET /health."""
        if self.engine.is_dead:
            raise ApiError(503, "the engine has stopped")
        return Response(status_code=200)

    async def version(self, request: Request) -> ASGIApp:
        """GET /version."""
        return JSONResponse({"version": jaxpage.__version__})

    async def load(self, request: Request) -> ASGIApp:
        """GET /load."""
        return JSONResponse({"server_load": self.num_in_flight})

    def check_key(self, request: Request) -> None:
        """Raises ApiError 401 unless the request carries one of the server's keys, or the server has none."""
        if not self._api_keys:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = key.strip().encode("latin-1")  # headers arrive decoded this way: these are the bytes sent
        # Every key is compared, so that the time taken says nothing.
        matches = [hmac.compare_digest(given, known) for known in self._api_keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError(401, "missing or wrong API key", headers={"WWW-Authenticate": "Bearer"})

    async def _checked_body(self, http: Request, check: Callable[[dict[str, Any]], Result]) -> Result:
        raw = await read_body(http, self._max_body_bytes)
        check_content_type(http)
        if len(raw) <= SMALL_BODY_BYTES:
            return check(parse_object(raw))
        return await self._in_thread(lambda: check(parse_object(raw)))

    async def _with_tokenizer(self, http: Request, answer: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        body = await self._checked_body(http, lambda body: body)
        return await self._in_thread(lambda: answer(body, self._limits, self._prompts, self._check_model))

    async def _in_thread(self, function: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.engine.model_name:
            raise ApiError(404, f"the model {shown(name)} does not exist", "model")

    def _check_prompt(self, prompt: PreparedPrompt, wanted: GenerationRequest) -> None:
        try:
            self.engine.check(prompt.token_ids, wanted.params, wanted.priority)
        except ParameterError as error:
            if error.parameter != "beam_width":
                raise
            raise ParameterError("n", error.reason) from None  # the client's name for it

    def _check_admission(self) -> None:
        if self.is_draining:
            raise unavailable("the server is shutting down")
        if self.engine.is_dead:
            raise ApiError(503, "the engine has stopped")

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self.engine.model_name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "jaxpage",
            "root": self.engine.model_name,
            "parent": None,
            "max_model_len": self.engine.max_model_len,
        }


async def _events(generation: Generation, shape: CompletionFormat) -> AsyncGenerator[dict[str, Any]]:
    async with contextlib.aclosing(generation.pieces()) as pieces:
        async for piece in coalesced(pieces, shape.request.stream_interval):
            for chunk in shape.chunks(generation, piece):
                yield chunk
    if shape.request.include_usage:
        yield shape.usage_chunk(generation)


class Envelope:
    """The outermost layer: request ids, the count of requests in flight, and an error body for every fault."""

    def __init__(self, app: ASGIApp, server: ApiServer) -> None:
        self._app = app
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        state = scope.setdefault("state", {})
        state["has_client_id"] = REQUEST_ID.fullmatch(given) is not None
        state["request_id"] = given if state["has_client_id"] else uuid.uuid4().hex
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = [*message.get("headers", []), (b"x-request-id", state["request_id"].encode())]
                message = {**message, "headers": headers}
            await send(message)

        counted = scope["method"] == "POST" and scope["path"].startswith("/v1/")
        self._server.num_in_flight += counted
        try:
            await self._app(scope, receive, send_with_id)
        except ClientGoneError:
            pass  # what it started has been aborted on the way here
        except Exception as error:
            answer = to_api_error(error)
            if not started:
                await error_response(answer)(scope, receive, send_with_id)
        finally:
            self._server.num_in_flight -= counted


def create_app(engine: Any, *, api_keys: Sequence[str] = (), max_body_bytes: int = DEFAULT_MAX_BODY_BYTES) -> Starlette:
    """The ASGI app for ``engine``; ``app.state.server`` is its ``ApiServer``.

    Args:
        engine: an ``AsyncLLMEngine`` or anything with its methods.
        api_keys: accepted bearer keys for ``/v1/*`` and the cache's reset; none means open.
        max_body_bytes: larger bodies are refused unread.
    """
    server = ApiServer(engine, api_keys, max_body_bytes)

    def guarded(handler: Handler) -> Handler:
        async def check_then_handle(request: Request) -> Any:
            server.check_key(request)
            return await handler(request)

        return check_then_handle

    async def http_error(request: Request, error: Exception) -> Response:
        return error_response(to_api_error(error))

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        yield
        server.close()

    routes = [
        Route("/v1/completions", guarded(server.completions), methods=["POST"]),
        Route("/v1/chat/completions", guarded(server.chat_completions), methods=["POST"]),
        Route("/v1/models", guarded(server.models)),
        Route("/v1/models/{model_id:path}", guarded(server.model)),
        # Not under /v1, but it slows everybody down: not for strangers.
        Route("/flush_cache", guarded(server.reset_prefix_cache), methods=["POST"]),
        Route("/reset_prefix_cache", guarded(server.reset_prefix_cache), methods=["POST"]),
        Route("/tokenize", server.tokenize, methods=["POST"]),
        Route("/detokenize", server.detokenize, methods=["POST"]),
        Route("/tokenizer_info", server.tokenizer_info),
        Route("/health", server.health),
        Route("/version", server.version),
        Route("/load", server.load),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Envelope, server=server)],
        exception_handlers={HTTPException: http_error},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.server = server
    return app
