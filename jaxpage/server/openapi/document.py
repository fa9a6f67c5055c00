"""Owns the document itself: the paths, and the statuses that each of them answers with.

It must not know fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jaxpage
from jaxpage.server.fields import Limits
from jaxpage.server.openapi.answers import answer_schemas
from jaxpage.server.openapi.requests import request_schemas
from jaxpage.server.openapi.shapes import Schema, ref
from jaxpage.server.options import ServerOptions

MEANINGS = {
    200: "The answer",
    304: "The client has the newest file",
    400: "A field or the body is wrong; param names the field",
    401: "The key is missing or wrong",
    404: "There is no such route, model or file, or the server was not started for it",
    405: "The route has other methods",
    413: "The body is too large",
    500: "A fault of this request alone",
    503: "Too busy, shutting down, or the engine has stopped",
}
BODY_STATUSES = (400, 404, 413, 500, 503)
PROFILE_STATUSES = (400, 404, 500, 503)


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """One path.

    Attributes:
        body: component of the request's body, for POST.
        answer: component of the answer, or a media type, or "" for none.
        statuses: besides 200 and 405, and 401 where it is guarded.
        streams: with ``stream`` true the answer is a stream of events.
    """

    method: str
    path: str
    summary: str
    answer: str = ""
    body: str | None = None
    statuses: tuple[int, ...] = (500,)
    is_guarded: bool = False
    streams: bool = False


ENDPOINTS = (
    Endpoint("post", "/v1/completions", "Continue texts", "Completion", "CompletionRequest", BODY_STATUSES, True, True),
    Endpoint(
        "post", "/v1/chat/completions", "Answer messages", "ChatCompletion", "ChatRequest", BODY_STATUSES, True, True
    ),
    Endpoint("post", "/v1/embeddings", "Make vectors of texts", "Embeddings", "EmbeddingRequest", BODY_STATUSES, True),
    Endpoint("get", "/v1/models", "List the names of the model", "Models", is_guarded=True),
    Endpoint("get", "/v1/models/{model_id}", "One name of the model", "Model", statuses=(404, 500), is_guarded=True),
    Endpoint("post", "/tokenize", "Make ids of a text or of messages", "Tokens", "TokenizeRequest", BODY_STATUSES),
    Endpoint("post", "/detokenize", "Make a text of ids", "Text", "DetokenizeRequest", BODY_STATUSES),
    Endpoint("get", "/tokenizer_info", "What remote evaluation asks of a tokenizer", "TokenizerInfo"),
    Endpoint("get", "/health", "200 if the engine serves", statuses=(503,)),
    Endpoint("get", "/version", "The server's version", "Version"),
    Endpoint("get", "/load", "Generating requests in flight", "Load"),
    Endpoint("post", "/reset_prefix_cache", "Forget cached prefixes", statuses=(503,), is_guarded=True),
    Endpoint("post", "/flush_cache", "The same", statuses=(503,), is_guarded=True),
    Endpoint("get", "/openapi.json", "This document", "application/json"),
    Endpoint("get", "/metrics", "Prometheus metrics", "text/plain"),
    Endpoint("post", "/start_profile", "Start a JAX profile", statuses=PROFILE_STATUSES, is_guarded=True),
    Endpoint("post", "/stop_profile", "End it", statuses=PROFILE_STATUSES, is_guarded=True),
    Endpoint("get", "/", "The page", "text/html", statuses=(304,)),
    Endpoint("get", "/page/{name}", "What the page loads", "*/*", statuses=(304, 404)),
    Endpoint(
        "get", "/live", "The engine as a stream of pictures", "text/event-stream", statuses=(503,), is_guarded=True
    ),
)


def document(limits: Limits, options: ServerOptions, names: Sequence[str]) -> dict[str, Any]:
    """The OpenAPI document of a server with these limits, options and model names."""
    paths: dict[str, Any] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method] = _operation(endpoint, bool(options.api_key))
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxpage", "version": jaxpage.__version__},
        "paths": paths,
        "components": {
            "schemas": request_schemas(limits, names) | answer_schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(endpoint: Endpoint, has_keys: bool) -> dict[str, Any]:
    statuses = sorted({405, *endpoint.statuses, *((401,) if endpoint.is_guarded else ())})
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "responses": {"200": _answer(endpoint)} | {str(status): _refusal(status) for status in statuses},
    }
    if endpoint.is_guarded and has_keys:
        operation["security"] = [{"key": []}]
    if endpoint.body is not None:
        operation["requestBody"] = {"required": True, "content": _json(ref(endpoint.body))}
    if "{" in endpoint.path:
        name = endpoint.path.partition("{")[2].rstrip("}")
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation


def _answer(endpoint: Endpoint) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": MEANINGS[200]}
    if "/" in endpoint.answer:
        answer["content"] = {endpoint.answer: {}}
    elif endpoint.answer:
        streams = {"text/event-stream": {"schema": {"type": "string"}}} if endpoint.streams else {}
        answer["content"] = _json(ref(endpoint.answer)) | streams
    return answer


def _refusal(status: int) -> dict[str, Any]:
    return {"description": MEANINGS[status]} | ({} if status == 304 else {"content": _json(ref("Error"))})


def _json(schema: Schema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
