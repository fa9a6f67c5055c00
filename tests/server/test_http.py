"""What holds for every route: status codes, headers, keys, body limit, JSON, and the small endpoints."""

from __future__ import annotations

import pytest
from api_client import Api

import jaxpage
from jaxpage.server import json_body

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"
GOOD = {"prompt": "Hi"}


def assert_error(response, status: int, kind: str) -> None:
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (status, status, kind)
    assert isinstance(error["message"], str)
    assert response.headers["x-request-id"]


async def test_unknown_routes_and_methods(api):
    for path in ("/v1", "/v1/nothing", "/v1/completions/", "/metrics/x"):
        assert_error(await api.client.get(path), 404, "NotFoundError")
    for method, path in [("GET", PATH), ("PUT", PATH), ("POST", "/v1/models"), ("POST", "/health"), ("OPTIONS", PATH)]:
        response = await api.client.request(method, path)
        assert_error(response, 405, "MethodNotAllowedError")
        assert response.headers["allow"]
    assert (
        "access-control-allow-origin" not in (await api.client.get("/health", headers={"Origin": "http://x"})).headers
    )


async def test_small_endpoints(api):
    models = (await api.client.get("/v1/models")).json()
    assert models["object"] == "list"
    (card,) = models["data"]
    assert card["id"] == "fake"
    assert card["max_model_len"] == 64
    assert (await api.client.get("/v1/models/fake")).json() == card
    for name in ("nope", "a/b", ""):
        assert_error(await api.client.get(f"/v1/models/{name}"), 404, "NotFoundError")
    health = await api.client.get("/health")
    assert (health.status_code, health.content) == (200, b"")
    assert (await api.client.get("/version")).json() == {"version": jaxpage.__version__}
    assert (await api.client.get("/load")).json() == {"server_load": 0}


@pytest.mark.parametrize("path", ["/flush_cache", "/reset_prefix_cache"])
async def test_pfx_3c_reset_of_the_prefix_cache(engine, path):
    api = Api(engine, api_key=("one",))
    headers = {"Authorization": "Bearer one"}
    assert_error(await api.client.get(path, headers=headers), 405, "MethodNotAllowedError")
    assert_error(await api.client.post(path), 401, "AuthenticationError")
    assert engine.num_resets == 0, "whoever empties the cache slows everybody down: it takes a key"
    response = await api.client.post(path, headers=headers)
    assert (response.status_code, response.content) == (200, b"")
    assert response.headers["x-request-id"]
    assert engine.num_resets == 1
    engine.is_dead = True
    assert_error(await api.client.post(path, headers=headers), 503, "ServiceUnavailableError")


async def test_model_ids_may_hold_slashes(engine):
    engine.model_name = "org/name"
    response = await Api(engine).client.get("/v1/models/org/name")
    assert response.json()["id"] == "org/name"


async def test_keys(engine):
    api = Api(engine, api_key=("one", "zwei-ü"))
    wrong = [None, "one", "Bearer", "Bearer ", "Bearer two", "Basic one", "Bearer one two", "Bearer \u00e4"]
    for value in wrong:
        headers = {} if value is None else {"Authorization": value.encode()}
        for path in (PATH, "/v1/chat/completions"):
            assert_error(await api.post(path, GOOD, headers=headers), 401, "AuthenticationError")
        assert_error(await api.client.get("/v1/models", headers=headers), 401, "AuthenticationError")
        assert_error(await api.client.get("/v1/nothing", headers=headers), 404, "NotFoundError")
    for key in ("one", "zwei-ü"):
        headers = {"Authorization": b"bearer " + key.encode()}
        assert (await api.post(PATH, GOOD, headers=headers)).status_code == 200
    for path in ("/health", "/version", "/tokenizer_info"):
        assert (await api.client.get(path)).status_code == 200
    assert (await api.post("/tokenize", GOOD)).status_code == 200


@pytest.mark.parametrize("value", ["", "x" * 10_000, 'a"b', "a%20b", "a b", "ä"])
async def test_val_4a_odd_ids_in_the_header_are_replaced(api, value):
    headers = {"X-Request-Id": value.encode()}
    response = await api.post(PATH, GOOD, headers=headers)
    assert response.status_code == 200
    used = response.headers["x-request-id"]
    assert json_is_id(used)
    assert used in response.json()["id"]
    assert json_is_id((await api.post(PATH, {"prompt": 5}, headers=headers)).headers["x-request-id"])


def json_is_id(text: str) -> bool:
    return len(text) == 32 and text.isalnum()


async def test_val_4_request_ids_of_header_and_body(api, engine):
    response = await api.post(PATH, GOOD, headers={"X-Request-Id": "Az09._:-"})
    assert response.headers.get_list("x-request-id") == ["Az09._:-"]
    assert response.json()["id"] == "cmpl-Az09._:-"
    response = await api.post(PATH, GOOD | {"request_id": "body"})
    assert response.headers["x-request-id"] == "body"
    response = await api.post(PATH, GOOD | {"request_id": "body"}, headers={"X-Request-Id": "header"})
    assert response.headers["x-request-id"] == "header"
    assert response.json()["id"] == "cmpl-header"
    response = await api.post(PATH, {"prompt": 5}, headers={"X-Request-Id": "header"})
    assert response.headers["x-request-id"] == "header"


async def test_fe_1b_body_limit(engine):
    api = Api(engine, max_body_bytes=1000)
    exact = b'{"prompt": "Hi"}'.ljust(1000)
    assert (await api.post(PATH, exact)).status_code == 200
    assert_error(await api.post(PATH, exact + b" "), 413, "PayloadTooLargeError")
    assert_error(await api.post(PATH, b" " * 1000), 400, "BadRequestError")

    async def chunks():
        for sent in range(100):
            assert sent < 12, "read on after the limit"
            yield b" " * 100

    response = await api.client.post(PATH, content=chunks(), headers={"Content-Type": "application/json"})
    assert_error(response, 413, "PayloadTooLargeError")
    assert response.headers["connection"] == "close"
    response = await api.client.post(PATH, content=b" " * 1001, headers={"Content-Type": "text/plain"})
    assert response.status_code == 413, "size comes before content type"


async def test_content_type(api):
    for value in ("text/plain", "", "application/jsonx", "multipart/form-data"):
        response = await api.client.post(PATH, content=b'{"prompt": "Hi"}', headers={"Content-Type": value})
        assert_error(response, 400, "BadRequestError")
    assert_error(await api.client.post(PATH, content=b'{"prompt": "Hi"}'), 400, "BadRequestError")
    for value in ("application/json; charset=utf-8", "Application/JSON"):
        response = await api.client.post(PATH, content=b'{"prompt": "Hi"}', headers={"Content-Type": value})
        assert response.status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"x"', b"5", b'{"prompt": "Hi",}', b"{'prompt': 1}", b'{"prompt": "Hi"} x',
        b'\xef\xbb\xbf{"prompt": "Hi"}', b'{"prompt": "\xff"}', b'{"prompt": "a\nb"}', b"[" * 100_000,
        b'{"x":' * 100_000, b'{"x": ' + b"9" * 5000 + b"}", '{"prompt": "Hi"}'.encode("utf-16"),
    ],
    ids=range(16),
)  # fmt: skip
async def test_malformed_json(api, body):
    response = await api.post(PATH, body)
    assert_error(response, 400, "BadRequestError")
    assert response.json()["error"]["param"] is None


async def test_numbers_and_characters_that_json_cannot_carry(api):
    for literal in (b"NaN", b"Infinity", b"-Infinity", b"1e400"):
        await api.refused(PATH, b'{"prompt": "a", "temperature": ' + literal + b"}", "temperature")
        await api.refused(PATH, b'{"prompt": "a", "x": {"y": [1, ' + literal + b"]}}", "x")
    for text in (b'"\\ud800"', b'"a\\uDFFFb"', b'["a", "\\ud83d"]'):
        await api.refused(PATH, b'{"prompt": ' + text + b"}", "prompt")
    await api.refused(PATH, b'{"prompt": "a", "\\ud800": 1}', None)
    assert (await api.post(PATH, b'{"prompt": "\\ud83d\\ude00"}')).status_code == 200


async def test_a_body_that_stalls_is_cut_off(engine, monkeypatch):
    monkeypatch.setattr(json_body, "BODY_TIMEOUT_S", 0.05)
    api = Api(engine)
    sent: list[dict] = []
    first = iter([{"type": "http.request", "body": b'{"prompt"', "more_body": True}])

    async def receive():
        import asyncio

        message = next(first, None)
        if message is None:
            await asyncio.sleep(60)
        return message

    async def send(message):
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": PATH, "headers": headers, "query_string": b""}
    await api.app(scope, receive, send)
    assert sent[0]["status"] == 400
    assert (b"connection", b"close") in sent[0]["headers"]
    assert api.app.state.server.num_in_flight == 0


async def test_draining_refuses_new_work_only(api):
    api.app.state.server.is_draining = True
    for stream in (False, True):
        response = await api.post(PATH, GOOD | {"stream": stream})
        assert_error(response, 503, "ServiceUnavailableError")
        assert response.headers["retry-after"] == "1"
    assert_error(await api.post(PATH, GOOD | {"n": 0}), 400, "BadRequestError")
    assert (await api.client.get("/health")).status_code == 200
