"""Owns the options of the HTTP side: what ``create_app`` takes and what the flags of the server set.

It must not know routes or the engine.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from jaxpage.params import MAX_N, MAX_STOP_STRINGS

DEFAULT_MAX_BODY_BYTES = 32 * 1024 * 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How the app serves. Each field has a flag of the same name, in ``server/cli.py``.

    Attributes:
        api_key: accepted bearer keys of guarded routes; none means open.
        max_body_bytes: larger bodies are refused unread.
        max_num_queued_reqs: samples in flight, waiting or running, from which on new calls get a 503; None: no limit.
        max_num_queued_tokens: prompt tokens that wait for their first output, from which on new calls get a 503.
        max_n: the largest ``n`` of a request.
        max_stop_strings: most ``stop`` strings of a request.
        pooling: how embeddings are made unless a request says otherwise: of the last token, or as the mean of all.
        sse_keep_alive_interval: seconds of silence after which a stream gets a comment line; None: never.
        allowed_origins: origins whose pages may use the API (CORS); none: no page may.
        allowed_methods, allowed_headers, allow_credentials: what those pages may send.
        otlp_traces_endpoint: OpenTelemetry collector that gets a span for each prompt; None: no tracing.
        profiler_dir: where JAX profiles are written; None: nobody can record any.
        chat_template: Jinja source used instead of the model's own template.
        chat_template_content_format: how it reads content: auto, string or openai (lists of parts).
        trust_request_chat_template: requests may bring templates of their own.
        enable_auto_tool_choice: the model may be left to choose whether it calls a tool.
        tool_call_parser: the format of the model's calls, a key of ``TOOL_PARSERS``; auto: as its template shows.
        tool_prompt: auto: tools are explained in a message if the template has no place for them; template: never.
        reasoning_parser: think: what stands in ``<think>`` is told from the answer; none: it is part of it.
    """

    api_key: tuple[str, ...] = ()
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    max_n: int = MAX_N
    max_stop_strings: int = MAX_STOP_STRINGS
    pooling: str = "last"
    sse_keep_alive_interval: float | None = None
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    otlp_traces_endpoint: str | None = None
    profiler_dir: str | None = None
    chat_template: str | None = None
    chat_template_content_format: str = "auto"
    trust_request_chat_template: bool = False
    enable_auto_tool_choice: bool = True
    tool_call_parser: str = "auto"
    tool_prompt: str = "auto"
    reasoning_parser: str = "none"

    @classmethod
    def from_cli_args(cls, namespace: argparse.Namespace) -> ServerOptions:
        """The options parsed by a parser with the server's flags."""
        values: dict[str, Any] = {field.name: getattr(namespace, field.name) for field in dataclasses.fields(cls)}
        return cls(**values)


DEFAULT_OPTIONS = ServerOptions()
