"""Owns the OpenTelemetry spans of generating calls: one ``llm_request`` a prompt, with vLLM's attributes.

Spans are made on the event loop when a prompt has ended; a thread of OpenTelemetry's own sends them. It must not know
how the engine measures. The packages are optional and imported when tracing is wanted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from jaxpage.errors import StartupError
from jaxpage.params import BeamSearchParams, SamplingParams
from jaxpage.request import RequestOutput

PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
PROTOCOLS = ("grpc", "http/protobuf")


def check_tracing() -> None:
    """Raises StartupError, in one line, if spans could not be sent: for before the model is loaded."""
    _exporter_class()


class Tracer:
    """Sends spans to an OpenTelemetry collector.

    Args:
        endpoint: of the collector, for example ``http://localhost:4317``; or with ``http/protobuf`` in
            ``OTEL_EXPORTER_OTLP_TRACES_PROTOCOL`` ``http://localhost:4318/v1/traces``. OpenTelemetry's other variables
            count too.

    Raises:
        StartupError: if the packages are missing or the protocol is unknown.
    """

    def __init__(self, endpoint: str, model_name: str) -> None:
        exporter_class = _exporter_class()
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        # What the environment says about the service goes first.
        resource = Resource.create({"service.name": "jaxpage"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter_class(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("jaxpage")
        self._model_name = model_name

    def call(self, request_id: str, headers: Mapping[str, str], params: SamplingParams | BeamSearchParams) -> CallTrace:
        """The spans of one call; ``traceparent`` and ``tracestate`` among its headers name the span they belong to."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(dict(headers))
        attributes = {
            "gen_ai.request.id": request_id,
            "gen_ai.response.model": self._model_name,
            **_asked_for(params),
        }
        return CallTrace(self._tracer, parent, attributes)

    def close(self) -> None:
        """Sends what is left; blocks for some seconds if the collector does not answer."""
        self._provider.shutdown()


class CallTrace:
    """The spans of one call."""

    def __init__(self, tracer: Any, parent: Any, attributes: dict[str, Any]) -> None:
        self._tracer = tracer
        self._parent = parent
        self._attributes = attributes
        self._started_ns = time.time_ns()

    def ended(self, output: RequestOutput, num_tokens: int) -> None:
        """A prompt has ended with its last ``output``, and ``num_tokens`` in all samples."""
        metrics = output.metrics
        usage = {
            "gen_ai.usage.prompt_tokens": len(output.prompt_token_ids),
            "gen_ai.usage.completion_tokens": num_tokens,
        }
        if metrics is None or metrics.finished_time is None:
            self._span(usage, self._started_ns, time.time_ns())
            return
        arrival, admitted, end = metrics.arrival_time, metrics.first_scheduled_time, metrics.finished_time
        first, last = metrics.first_token_time or end, metrics.last_token_time or end
        latencies = {"gen_ai.latency.e2e": end - arrival}
        if metrics.first_token_time is not None:
            latencies["gen_ai.latency.time_to_first_token"] = first - arrival
        if admitted is not None:
            latencies |= {
                "gen_ai.latency.time_in_queue": admitted - arrival,
                "gen_ai.latency.time_in_model_prefill": first - admitted,
                "gen_ai.latency.time_in_model_decode": last - first,
                "gen_ai.latency.time_in_model_inference": last - admitted,
            }
        self._span(usage | latencies, int(arrival * 1e9), int(end * 1e9))

    def cut(self, num_prompt_tokens: int) -> None:
        """A prompt was given up before its end: the client left, or something failed."""
        self._span({"gen_ai.usage.prompt_tokens": num_prompt_tokens}, self._started_ns, time.time_ns(), is_whole=False)

    def _span(self, attributes: dict[str, Any], start_ns: int, end_ns: int, is_whole: bool = True) -> None:
        from opentelemetry.trace import SpanKind, StatusCode

        span = self._tracer.start_span(
            "llm_request",
            context=self._parent,
            kind=SpanKind.SERVER,
            attributes=self._attributes | attributes,
            start_time=start_ns,
        )
        if not is_whole:
            span.set_status(StatusCode.ERROR, "ended before its time")
        span.end(end_ns)


def _asked_for(params: SamplingParams | BeamSearchParams) -> dict[str, Any]:
    asked: dict[str, Any] = {"gen_ai.request.max_tokens": params.max_tokens}
    if isinstance(params, BeamSearchParams):
        asked["gen_ai.request.n"] = params.beam_width
    else:
        asked |= {
            "gen_ai.request.n": params.n,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
        }
    return {name: value for name, value in asked.items() if value is not None}


def _exporter_class() -> Any:
    protocol = os.environ.get(PROTOCOL_VARIABLE) or PROTOCOLS[0]
    if protocol not in PROTOCOLS:
        raise StartupError(f"{PROTOCOL_VARIABLE} must be one of {', '.join(PROTOCOLS)}, got {protocol[:200]!r}")
    try:
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        else:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise StartupError(f'--otlp-traces-endpoint needs pip install "jaxpage[otlp]": {error}') from None
    return OTLPSpanExporter
