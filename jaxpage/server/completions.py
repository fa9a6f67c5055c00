"""Owns POST /v1/completions and /v1/chat/completions: the order of their checks, and whole answers or streams.

It must not know fields, JSON shapes or how the engine works.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from jaxpage.server.chat_format import ChatFormat
from jaxpage.server.chat_protocol import ChatRequest, chat_request
from jaxpage.server.formats import CompletionFormat
from jaxpage.server.generation import Generation, coalesced
from jaxpage.server.prompts import PreparedPrompt
from jaxpage.server.protocol import GenerationRequest, completion_request
from jaxpage.server.state import ApiServer
from jaxpage.server.streaming import EventStream, while_connected


def routes(server: ApiServer) -> list[Route]:
    """The generating endpoints."""

    async def completions(http: Request) -> ASGIApp:
        def check(body: dict[str, Any]) -> Any:
            return completion_request(body, server.limits)

        return await _generate(server, http, check, server.prompts.completion, CompletionFormat)

    async def chat_completions(http: Request) -> ASGIApp:
        def check(body: dict[str, Any]) -> Any:
            return chat_request(body, server.limits, server.chat)

        def build(wanted: ChatRequest) -> list[PreparedPrompt]:
            prompt = server.prompts.chat(wanted)
            wanted.limit_calls(prompt.opens_thoughts)
            return [prompt]

        return await _generate(server, http, check, build, ChatFormat)

    return [
        Route("/v1/completions", server.guarded(completions), methods=["POST"]),
        Route("/v1/chat/completions", server.guarded(chat_completions), methods=["POST"]),
    ]


async def _generate(
    server: ApiServer,
    http: Request,
    check: Callable[[dict[str, Any]], GenerationRequest],
    build_prompts: Callable[[Any], list[PreparedPrompt]],
    answer_format: type[CompletionFormat],
) -> ASGIApp:
    """All checks, then the answer: whole, or as a stream whose events start with the response."""
    wanted = await server.checked_body(http, check)
    if wanted.request_id is not None and not http.state.has_client_id:
        http.state.request_id = wanted.request_id
    model = server.check_model(wanted.model)

    def prepare() -> list[PreparedPrompt]:
        prompts = build_prompts(wanted)
        for prompt in prompts:
            _check_prompt(server, prompt, wanted)
        return prompts

    # A thread for a short prompt would cost more than the prompt, and wait for Python's lock twice.
    prompts = prepare() if wanted.is_light else await server.in_thread(prepare)
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    ticket = server.admit(http, len(prompts) * wanted.num_choices, num_tokens)
    trace = server.trace(http, wanted.params)
    generation = Generation(server.engine, prompts, wanted, ticket, http.state.request_id, trace)
    shape = answer_format(server.engine.tokenizer, wanted, model, http.state.request_id)
    if wanted.stream:
        return EventStream(_events(generation, shape), shape.envelope, server.options.sse_keep_alive_interval)
    choices = await while_connected(http.receive, generation.choices())
    # Score lists may be large; a short answer is not worth a thread.
    if wanted.num_logprobs is None and wanted.num_prompt_logprobs is None:
        return JSONResponse(shape.whole(generation, choices))
    return await server.in_thread(lambda: JSONResponse(shape.whole(generation, choices)))


def _check_prompt(server: ApiServer, prompt: PreparedPrompt, wanted: GenerationRequest) -> None:
    wanted.check_params(lambda params: server.engine.check(prompt.token_ids, params, wanted.priority))


async def _events(generation: Generation, shape: CompletionFormat) -> AsyncGenerator[dict[str, Any]]:
    async with contextlib.aclosing(generation.pieces()) as pieces:
        async for piece in coalesced(pieces, shape.request.stream_interval):
            for chunk in shape.chunks(generation, piece):
                yield chunk
    if shape.request.include_usage:
        yield shape.usage_chunk(generation)
