"""Spans as an OpenTelemetry collector gets them, on loopback: over HTTP, and over gRPC."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from api_client import Api
from fake_engine import FakeEngine
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from jaxpage import serve
from jaxpage.errors import StartupError
from jaxpage.params import BeamSearchParams, SamplingParams
from jaxpage.request import RequestMetrics, RequestOutput
from jaxpage.server.tracing import Tracer, check_tracing

pytestmark = pytest.mark.anyio
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collected:
    """What a collector has got.

    Attributes:
        spans: in the order of arrival. services: the ``service.name`` of each batch.
    """

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: list[str] = []

    def take(self, request: Any) -> None:
        for each in request.resource_spans:
            named = {pair.key: pair.value.string_value for pair in each.resource.attributes}
            self.services.append(named["service.name"])
            self.spans += [span for scope in each.scope_spans for span in scope.spans]


def attributes(span: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}


@pytest.fixture
def over_http(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Collected]]:
    """A collector's endpoint, and what it gets."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    collected = Collected()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collected.take(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces", collected
        server.shutdown()
        thread.join()


async def test_a_span_for_each_prompt_of_a_call(engine: FakeEngine, over_http: tuple[str, Collected]) -> None:
    endpoint, collected = over_http
    api = Api(engine, otlp_traces_endpoint=endpoint)
    headers = {"X-Request-Id": "my-id", "traceparent": f"00-{TRACE}-{PARENT}-01"}
    body = {"prompt": ["Hi", "Hello"], "n": 2, "temperature": 0.5, "top_p": 0.9, "max_tokens": 2}
    assert (await api.post("/v1/completions", body, headers=headers)).status_code == 200
    await api.stream("/v1/chat/completions", max_tokens=3)
    assert (await api.post("/v1/completions", {"prompt": "Hi", "n": 0})).status_code == 400
    api.app.state.server.close()
    one, other, streamed = collected.spans
    assert set(collected.services) == {"jaxpage"}
    for span in (one, other):
        assert span.name == "llm_request"
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
        assert span.end_time_unix_nano >= span.start_time_unix_nano > 0
        expected = {
            "gen_ai.request.id": "my-id",
            "gen_ai.response.model": "fake",
            "gen_ai.request.n": 2,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.top_p": 0.9,
            "gen_ai.request.max_tokens": 2,
            "gen_ai.usage.completion_tokens": 4,
        }
        assert attributes(span).items() >= expected.items()
    lengths = {attributes(span)["gen_ai.usage.prompt_tokens"] for span in (one, other)}
    assert lengths == {len(engine.tokenizer.encode(text)) for text in ("Hi", "Hello")}
    assert streamed.trace_id.hex() != TRACE and not streamed.parent_span_id
    assert attributes(streamed)["gen_ai.usage.completion_tokens"] == 3


async def test_what_is_cut_short_gets_a_span_too(engine: FakeEngine, over_http: tuple[str, Collected]) -> None:
    endpoint, collected = over_http
    engine.fail_after = 1
    api = Api(engine, otlp_traces_endpoint=endpoint)
    assert (await api.post("/v1/completions", {"prompt": "Hi", "max_tokens": 5})).status_code == 500
    api.app.state.server.close()
    [span] = collected.spans
    assert (span.status.code, span.status.message) == (2, "ended before its time")
    assert "gen_ai.usage.completion_tokens" not in attributes(span)


def ended(metrics: RequestMetrics) -> RequestOutput:
    return RequestOutput("id", None, [1, 2, 3], [], True, metrics=metrics)


def test_latencies(over_http: tuple[str, Collected], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    endpoint, collected = over_http
    tracer = Tracer(endpoint, "model")
    moments = RequestMetrics(1000.0, 1000.5, 1001.5, 1004.5, 1004.75)
    tracer.call("a", {}, SamplingParams(max_tokens=None)).ended(ended(moments), 7)
    tracer.call("b", {}, BeamSearchParams(beam_width=3)).ended(ended(RequestMetrics(1000, 1002, None, None, 1003)), 0)
    tracer.close()
    assert collected.services == ["mine"]
    whole, without_tokens = map(attributes, collected.spans)
    assert (collected.spans[0].start_time_unix_nano, collected.spans[0].end_time_unix_nano) == (
        1_000_000_000_000,
        1_004_750_000_000,
    )
    assert {name: value for name, value in whole.items() if "latency" in name} == {
        "gen_ai.latency.e2e": 4.75,
        "gen_ai.latency.time_to_first_token": 1.5,
        "gen_ai.latency.time_in_queue": 0.5,
        "gen_ai.latency.time_in_model_prefill": 1.0,
        "gen_ai.latency.time_in_model_decode": 3.0,
        "gen_ai.latency.time_in_model_inference": 4.0,
    }
    assert "gen_ai.request.max_tokens" not in whole
    assert "gen_ai.latency.time_to_first_token" not in without_tokens
    assert (without_tokens["gen_ai.request.n"], without_tokens["gen_ai.latency.time_in_model_inference"]) == (3, 1)


def test_grpc_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", raising=False)
    collected = Collected()

    class Service(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            collected.take(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with contextlib.closing(Tracer(f"http://127.0.0.1:{port}", "model")) as tracer:
            tracer.call("a", {}, SamplingParams()).ended(ended(RequestMetrics(1.0, finished_time=2.0)), 1)
        server.stop(0).wait()
    assert [attributes(span)["gen_ai.request.id"] for span in collected.spans] == ["a"]


def test_what_keeps_spans_from_being_sent_is_known_at_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "smoke signals")
    with pytest.raises(StartupError, match="must be one of grpc, http/protobuf, got 'smoke signals'"):
        check_tracing()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    assert serve.main(["--otlp-traces-endpoint", "http://localhost:4317", "--model", "no such model"]) == 1
    error = capsys.readouterr().err
    assert error.startswith('jaxpage: error: --otlp-traces-endpoint needs pip install "jaxpage[otlp]": ')
    assert error.count("\n") == 1


def test_without_an_endpoint_nothing_of_it_is_loaded() -> None:
    code = "import sys, jaxpage.serve, jaxpage.server.app; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
