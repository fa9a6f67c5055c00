"""What the server says about itself: metrics over HTTP, the log's line for each call, and profiles."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from api_client import Api
from fake_engine import FakeEngine

from jaxpage.console import show_log
from jaxpage.errors import ParameterError

sys.path.append(str(Path(__file__).parents[1] / "metrics"))
from scrapes import Scrape, check_idle

pytestmark = pytest.mark.anyio
COMPLETIONS = 'http_requests_total{handler="/v1/completions",method="POST",status="%s"}'


async def scrape(api: Api) -> Scrape:
    response = await api.client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return Scrape(response.content)


async def test_metrics_need_no_key_and_are_not_counted_themselves(engine: FakeEngine) -> None:
    api = Api(engine, api_key=("secret",))
    before = await scrape(api)
    check_idle(before)
    for path in ("/metrics", "/health", "/load", "/version"):
        assert (await api.client.get(path)).status_code == 200
    assert (await scrape(api)).since(before) == {}
    assert "fake" in (await api.client.get("/metrics")).text


async def test_calls_are_counted_by_route(api: Api) -> None:
    before = await scrape(api)
    await api.complete(prompt="Hi", max_tokens=2)
    await api.stream("/v1/completions", prompt="Hi", max_tokens=2)
    await api.client.get("/v1/models/fake")
    moved = (await scrape(api)).since(before)
    counts = {key: value for key, value in moved.items() if not key.endswith("}") or "_sum" not in key}
    assert counts == {
        COMPLETIONS % "2xx": 2,
        'http_requests_total{handler="/v1/models/{model_id:path}",method="GET",status="2xx"}': 1,
        'http_request_duration_seconds_count{handler="/v1/completions",method="POST"}': 2,
        'http_request_duration_seconds_count{handler="/v1/models/{model_id:path}",method="GET"}': 1,
    }


@pytest.mark.parametrize(
    ("status", "path", "body", "options"),
    [
        (400, "/v1/completions", {"prompt": "Hi", "n": "x"}, {}),
        (401, "/v1/completions", {"prompt": "Hi"}, {"api_key": ("secret",)}),
        (404, "/v1/completions", {"prompt": "Hi", "model": "other"}, {}),
        (413, "/v1/completions", {"prompt": "Hi" * 99}, {"max_body_bytes": 100}),
    ],
)
async def test_g_refused_calls_count_nowhere_else(
    engine: FakeEngine, status: int, path: str, body: dict[str, Any], options: dict[str, Any]
) -> None:
    api = Api(engine, **options)
    before = await scrape(api)
    assert (await api.post(path, body)).status_code == status
    moved = (await scrape(api)).since(before)
    assert moved.pop(COMPLETIONS % "4xx") == 1
    assert all(key.startswith("http_request_duration_seconds") for key in moved)


async def test_refusals_for_want_of_room_are_counted_by_limit(engine: FakeEngine) -> None:
    api = Api(engine, max_num_queued_reqs=1)
    before = await scrape(api)
    ticket = api.app.state.server.admission.enter(1, 1)
    assert (await api.post("/v1/completions", {"prompt": "Hi"})).status_code == 503
    api.app.state.server.admission.release(ticket)
    moved = (await scrape(api)).since(before)
    assert moved['admission_rejections_total{reason="max_num_queued_reqs"}'] == 1
    assert moved[COMPLETIONS % "5xx"] == 1


async def test_unknown_routes_and_methods_make_few_series(api: Api) -> None:
    before = await scrape(api)
    for number in range(5):
        assert (await api.client.get(f"/nothing/{number}")).status_code == 404
        assert (await api.client.request(f"VERB{number}", "/v1/completions")).status_code == 405
    moved = (await scrape(api)).since(before)
    assert moved['http_requests_total{handler="none",method="GET",status="4xx"}'] == 5
    assert moved['http_requests_total{handler="/v1/completions",method="other",status="4xx"}'] == 5


@pytest.fixture
def log(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., list[str]]]:
    """Sets the log up as the command does; gives the lines on stderr since the last look."""
    names = ("jaxpage", "jaxpage.access", "uvicorn")
    before = {name: (list(logging.getLogger(name).handlers), logging.getLogger(name).level) for name in names}

    def lines(*arguments: str) -> list[str]:
        if arguments:
            show_log(*arguments)
        return capsys.readouterr().err.splitlines()

    yield lines
    for name, (handlers, level) in before.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = handlers, True
        logger.setLevel(level)


async def test_each_call_has_a_line_with_its_id(api: Api, log: Callable[..., list[str]]) -> None:
    log("info", "text", "info")
    await api.post("/v1/completions", {"prompt": "Hi"}, headers={"X-Request-Id": "my-id-1"})
    [line] = log()
    assert line.startswith("jaxpage: 127.0.0.1:123 POST /v1/completions 200 in ")
    assert line.endswith(" ms, request my-id-1")
    await api.client.get("/health")
    await api.client.get("/metrics")
    assert log() == []
    log("info", "text", "debug")
    await api.client.get("/health")
    assert "GET /health 200" in log()[0]
    log("info", "text", "warning")
    await api.complete(prompt="Hi")
    assert log() == []


async def test_structured_log(api: Api, log: Callable[..., list[str]]) -> None:
    log("info", "json", "info")
    refused = await api.post("/v1/chat/completions", {"messages": []}, headers={"X-Request-Id": "my-id-2"})
    [line] = log()
    event = json.loads(line)
    expected = {
        "level": "info",
        "logger": "jaxpage.access",
        "request_id": "my-id-2",
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": refused.status_code,
        "client": "127.0.0.1:123",
    }
    assert {name: event[name] for name in expected} == expected
    assert event["duration_ms"] > 0
    assert event["time"].endswith("Z")
    try:
        raise RuntimeError("what went wrong")
    except RuntimeError:
        logging.getLogger("jaxpage").exception("it failed:\n%s", "twice", extra={"num_running": 3})
    [line] = log()
    event = json.loads(line)
    assert (event["level"], event["message"], event["num_running"]) == ("error", "it failed:\ntwice", 3)
    assert event["exception"].endswith("RuntimeError: what went wrong")


async def test_a_path_cannot_forge_a_line(api: Api, log: Callable[..., list[str]]) -> None:
    log("info", "text", "info")
    await api.client.get("/x%0Ajaxpage:%20all%20is%20well%1b[2J")
    [line] = log()
    assert "GET /x%0Ajaxpage: all is well%1B[2J 404" in line


async def test_profiles(engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    async def start(directory: Path) -> None:
        if calls:
            raise ParameterError("profile", "is being recorded already")
        calls.append(directory)

    async def stop() -> None:
        if not calls:
            raise ParameterError("profile", "is not being recorded")
        calls.clear()

    monkeypatch.setattr(engine, "start_profile", start, raising=False)
    monkeypatch.setattr(engine, "stop_profile", stop, raising=False)
    off = Api(engine)
    assert [(await off.client.post(path)).status_code for path in ("/start_profile", "/stop_profile")] == [404, 404]
    api = Api(engine, profiler_dir=str(tmp_path), api_key=("secret",))
    assert (await api.client.post("/start_profile")).status_code == 401
    api.client.headers["Authorization"] = "Bearer secret"
    order = ["/stop_profile", "/start_profile", "/start_profile", "/stop_profile", "/stop_profile", "/start_profile"]
    assert [(await api.client.post(path)).status_code for path in order] == [400, 200, 400, 200, 400, 200]
    assert calls == [tmp_path]
    assert "already" in (await api.client.post("/start_profile")).json()["error"]["message"]
