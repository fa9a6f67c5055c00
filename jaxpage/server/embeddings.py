"""Owns POST /v1/embeddings: its fields, and its answer.

It must not know how a model makes a vector.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import uuid
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxpage.checks import check_bool, check_cache_salt, check_int
from jaxpage.errors import ParameterError, shown
from jaxpage.params import PoolingParams, TokensPrompt
from jaxpage.request import EmbeddingOutput, FinishReason
from jaxpage.server.errors import GenerationError
from jaxpage.server.fields import Body, Limits, check_str, field
from jaxpage.server.prompt_fields import PromptOptions, Prompts, check_prompts, check_truncation
from jaxpage.server.state import ApiServer
from jaxpage.server.streaming import while_connected

ENCODINGS = ("float", "base64")


@dataclasses.dataclass(kw_only=True)
class EmbeddingRequest(PromptOptions):
    """Body of POST /v1/embeddings.

    Attributes:
        encoding_format: "base64" packs each vector's float32 numbers, low byte first.
    """

    num_reserved: ClassVar[int] = 0

    model: str | None
    inputs: Prompts
    params: PoolingParams
    encoding_format: str
    cache_salt: str | None
    priority: int


def routes(server: ApiServer) -> list[Route]:
    """The endpoint."""

    async def embeddings(http: Request) -> Response:
        wanted = await server.checked_body(
            http, lambda body: check_embedding(body, server.limits, server.options.pooling)
        )
        model = server.check_model(wanted.model)
        prompts = await server.in_thread(lambda: _checked_prompts(server, wanted))
        server.admit(http, len(prompts), sum(map(len, prompts)))
        outputs = await while_connected(http.receive, _embed_all(server.engine, prompts, wanted))
        return await server.in_thread(lambda: JSONResponse(_answer(outputs, wanted, model)))

    return [Route("/v1/embeddings", server.guarded(embeddings), methods=["POST"])]


def check_embedding(body: Body, limits: Limits, pooling: str) -> EmbeddingRequest:
    """The checked fields of an embeddings body; raises ParameterError for the first one that is wrong."""
    encoding = field(body, "encoding_format", check_str, ENCODINGS[0])
    if encoding not in ENCODINGS:
        raise ParameterError("encoding_format", f"must be one of {', '.join(ENCODINGS)}, got {shown(encoding)}")
    field(body, "user", check_str)
    return EmbeddingRequest(
        model=field(body, "model", check_str),
        inputs=check_prompts(body, limits, "input", EmbeddingRequest.num_reserved),
        params=PoolingParams(
            pooling=field(body, "pooling", check_str, pooling),
            normalize=field(body, "normalize", check_bool, True),
            dimensions=field(body, "dimensions", check_int, low=1),
        ),
        encoding_format=encoding,
        add_special_tokens=field(body, "add_special_tokens", check_bool, True),
        cache_salt=field(body, "cache_salt", check_cache_salt),
        priority=field(body, "priority", check_int, 0, low=-(2**63), high=2**63 - 1),
        **check_truncation(body, limits, EmbeddingRequest.num_reserved),
    )


def _checked_prompts(server: ApiServer, wanted: EmbeddingRequest) -> list[list[int]]:
    prompts = server.prompts.encode_all("input", wanted.inputs, wanted)
    for token_ids in prompts:
        try:
            server.engine.check(token_ids, wanted.params, wanted.priority)
        except ParameterError as error:
            if error.parameter != "prompt":
                raise
            raise ParameterError("input", error.reason) from None  # the client's name for it
    return prompts


async def _embed_all(engine: Any, prompts: list[list[int]], wanted: EmbeddingRequest) -> list[EmbeddingOutput]:
    """The vectors in the order of ``prompts``; the first error ends all.

    Raises:
        GenerationError: if the engine has no vector for one of them.
    """
    tasks = [
        asyncio.ensure_future(
            engine.embed(
                TokensPrompt(prompt_token_ids=token_ids),
                wanted.params,
                uuid.uuid4().hex,
                cache_salt=wanted.cache_salt,
                priority=wanted.priority,
            )
        )
        for token_ids in prompts
    ]
    try:
        outputs = await asyncio.gather(*tasks)
        if any(output.finish_reason == FinishReason.ERROR for output in outputs):
            raise GenerationError("no embedding was computed (error)")
        return outputs
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _answer(outputs: list[EmbeddingOutput], wanted: EmbeddingRequest, model: str) -> dict[str, Any]:
    num_tokens = sum(output.num_prompt_tokens for output in outputs)
    vectors = [output.embedding.astype("<f4", copy=False) for output in outputs]
    if wanted.encoding_format == "base64":
        shown_vectors: list[Any] = [base64.b64encode(vector.tobytes()).decode("ascii") for vector in vectors]
    else:
        shown_vectors = [vector.tolist() for vector in vectors]
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(shown_vectors)
        ],
        "model": model,
        "usage": {
            "prompt_tokens": num_tokens,
            "total_tokens": num_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
        },
    }
