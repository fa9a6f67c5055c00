"""What who runs the server can set: admission limits, several names, other origins, a path in front, signs of life."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from api_client import Api

pytestmark = pytest.mark.anyio
COMPLETIONS = "/v1/completions"
GOOD = {"prompt": "Hi", "max_tokens": 4}
PAGE = "https://page.example"


async def until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("stream", [False, True])
async def test_full_queue_refuses_with_503_and_counts(engine, stream):
    api = Api(engine, max_num_queued_reqs=3)
    server = api.app.state.server
    engine.step_s = 0.05
    running = asyncio.create_task(api.post(COMPLETIONS, GOOD | {"n": 3}))
    await until(lambda: engine.running)
    response = await api.post(COMPLETIONS, GOOD | {"stream": stream})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["type"] == "ServiceUnavailableError"
    assert server.metrics.num_rejections == {"max_num_queued_reqs": 1, "max_num_queued_tokens": 0}
    assert (await api.post(COMPLETIONS, GOOD | {"n": 0})).status_code == 400, "its own mistake comes first"
    assert (await running).status_code == 200
    assert (await api.post(COMPLETIONS, GOOD | {"stream": stream})).status_code == 200, "there is room again"
    assert len(engine.seen) == 2, "what was refused never reached the engine"


async def test_prompt_tokens_count_until_the_first_output(engine):
    api = Api(engine, max_num_queued_tokens=10)
    engine.step_s = 0.1
    prompts = ["x" * 6, "y" * 6]
    running = asyncio.create_task(api.post(COMPLETIONS, GOOD | {"prompt": prompts}))
    await until(lambda: len(engine.running) == 2)
    assert (await api.post(COMPLETIONS, GOOD)).status_code == 503
    await asyncio.sleep(0.15)  # both have said something: nothing waits any more
    late = asyncio.create_task(api.post(COMPLETIONS, GOOD))
    assert (await running).status_code == (await late).status_code == 200
    assert api.app.state.server.metrics.num_rejections["max_num_queued_tokens"] == 1


async def test_calls_that_fail_or_are_refused_leave_no_ticket(engine):
    api = Api(engine, max_num_queued_reqs=1)
    engine.fail_after = 0
    for body in (GOOD, GOOD | {"stream": True}, {"prompt": ""}, GOOD | {"model": "x"}):
        await api.post(COMPLETIONS, body)
    assert (await api.post("/v1/embeddings", {"input": "a", "dimensions": 99})).status_code == 400
    engine.fail_after = None
    assert (await api.post(COMPLETIONS, GOOD)).status_code == 200


async def test_limits_on_samples_and_stop_strings(engine):
    api = Api(engine, max_n=2, max_stop_strings=1)
    await api.refused(COMPLETIONS, GOOD | {"n": 3}, "n")
    await api.refused(COMPLETIONS, GOOD | {"n": 3, "use_beam_search": True}, "n")
    await api.refused(COMPLETIONS, GOOD | {"stop": ["a", "b"]}, "stop")
    assert (await api.post(COMPLETIONS, GOOD | {"n": 2, "stop": "a"})).status_code == 200


async def test_several_names_for_the_model(engine):
    engine.aliases = ["also/this"]
    api = Api(engine)
    for name in ("fake", "also/this"):
        assert (await api.complete(model=name, **GOOD))["model"] == name
        assert (await api.chat(model=name))["model"] == name
        assert (await api.stream(COMPLETIONS, model=name, **GOOD))[0]["model"] == name
        assert (await api.client.get(f"/v1/models/{name}")).json()["id"] == name
    assert (await api.complete(**GOOD))["model"] == "fake"
    cards = (await api.client.get("/v1/models")).json()["data"]
    assert [card["id"] for card in cards] == ["fake", "also/this"]
    await api.refused(COMPLETIONS, GOOD | {"model": "nobody"}, "model", 404)


async def test_pages_of_other_origins_are_let_in_only_when_named(engine):
    preflight = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a"}
    closed = Api(engine, api_key=("k",))
    assert (await closed.client.options(COMPLETIONS, headers=preflight)).status_code == 405
    response = await closed.post(COMPLETIONS, GOOD, headers={"Origin": PAGE})
    assert not [name for name in response.headers if name.startswith("access-control")]

    opened = Api(engine, api_key=("k",), allowed_origins=(PAGE,), allowed_headers=("X-A", "Authorization"))
    response = await opened.client.options(COMPLETIONS, headers=preflight)
    assert response.status_code == 200, "a preflight carries no key"
    assert response.headers["access-control-allow-origin"] == PAGE
    assert "access-control-allow-credentials" not in response.headers
    assert response.headers["x-request-id"]
    for body, key in ((GOOD, "k"), (GOOD, "wrong"), ({"prompt": 5}, "k")):
        response = await opened.post(COMPLETIONS, body, headers={"Origin": PAGE, "Authorization": f"Bearer {key}"})
        assert response.headers["access-control-allow-origin"] == PAGE, "pages may read errors, too"
        assert "X-Request-Id" in response.headers["access-control-expose-headers"]
    other = await opened.post(COMPLETIONS, GOOD, headers={"Origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers
    engine.fail_after = 0
    response = await opened.post(COMPLETIONS, GOOD, headers={"Origin": PAGE, "Authorization": "Bearer k"})
    assert response.status_code == 500
    assert response.headers["access-control-allow-origin"] == PAGE


async def test_methods_and_credentials_of_other_origins(engine):
    api = Api(engine, allowed_origins=("*",), allowed_methods=("GET",), allow_credentials=True)
    ask = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    refused = await api.client.options(COMPLETIONS, headers=ask)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["message"], error["type"], error["param"]) == ("disallowed CORS method", "BadRequestError", None)
    assert refused.headers["content-type"] == "application/json"
    assert "Origin" in refused.headers["vary"]
    response = await api.client.options("/v1/models", headers=ask | {"Access-Control-Request-Method": "GET"})
    assert response.headers["access-control-allow-credentials"] == "true"
    response = await api.client.get("/v1/models", headers={"Origin": PAGE, "Cookie": "a=b"})
    assert response.headers["access-control-allow-origin"] == PAGE


async def test_silent_streams_get_comments_only_if_wanted(engine):
    engine.step_s = 0.12
    for interval, wanted in ((None, False), (0.03, True)):
        api = Api(engine, sse_keep_alive_interval=interval)
        response = await api.post(COMPLETIONS, GOOD | {"max_tokens": 2, "stream": True})
        frames = response.text.split("\n\n")
        comments = [frame for frame in frames if frame.startswith(":")]
        assert bool(comments) is wanted
        assert set(comments) <= {": keep-alive"}
        assert frames[-2:] == ["data: [DONE]", ""]
        assert all(frame.startswith("data: ") for frame in frames if frame and frame not in comments)


async def test_a_path_in_front_is_taken_away(engine):
    api = Api(engine)
    sent = []
    scope = {
        "type": "http", "method": "GET", "path": "/llm/v1/models", "root_path": "/llm", "headers": [],
        "query_string": b"",
    }  # fmt: skip

    async def send(message):
        sent.append(message)

    await api.app(scope, None, send)
    assert sent[0]["status"] == 200
    assert (await api.client.get("/llm/v1/models")).status_code == 404
    assert api.app.state.server.num_in_flight == 0


async def test_no_route_under_v1_is_open(engine):
    api = Api(engine, api_key=("k",))
    for route in api.app.routes:
        if route.path.startswith("/v1/"):
            method = "POST" if "POST" in route.methods else "GET"
            response = await api.client.request(method, route.path.replace("{model_id:path}", "fake"))
            assert response.status_code == 401, route.path
            assert response.headers["www-authenticate"] == "Bearer"


async def test_health_tells_a_dead_engine_and_not_a_draining_server(engine):
    api = Api(engine)
    api.app.state.server.is_draining = True
    assert (await api.client.get("/health")).status_code == 200
    engine.is_dead = True
    response = await api.client.get("/health")
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "the engine has stopped"


async def test_faults_say_nothing_of_the_inside(engine, caplog):
    engine.fail_after = 0
    api = Api(engine)
    for body in (GOOD, GOOD | {"stream": True}):
        text = (await api.post(COMPLETIONS, body)).text
        assert "internal error" in text
        assert "/etc" not in text and "secret" not in text
    assert "secret path /etc/passwd" in caplog.text
    engine.fail_after = None
    assert (await api.post(COMPLETIONS, GOOD)).status_code == 200, "the fault ended one request"


async def test_fe_1c_a_slow_compile_holds_up_its_own_request_only(engine, monkeypatch):
    api = Api(engine)
    check = engine.check
    compiled = []

    def compile_slowly(token_ids, params, priority=0):
        if params.structured_outputs is not None and not compiled:
            compiled.append(threading.current_thread().name)
            time.sleep(0.5)
        check(token_ids, params, priority)

    monkeypatch.setattr(engine, "check", compile_slowly)
    engine.step_s = 0.01
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    slow = asyncio.create_task(api.post(COMPLETIONS, GOOD | {"response_format": schema, "max_tokens": 1}))
    answers = 0
    while not slow.done():
        began = time.monotonic()
        assert (await api.client.get("/health")).status_code == 200
        assert (await api.post(COMPLETIONS, GOOD)).status_code == 200
        assert time.monotonic() - began < 0.4
        answers += 1
    assert answers > 1
    assert compiled[0].startswith("front-end")
    assert (await slow).status_code == 200
