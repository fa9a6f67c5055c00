"""GET /openapi.json: it names every route and exactly the fields that the checks read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from api_client import Api
from jsonschema import Draft202012Validator

from jaxpage.errors import ParameterError
from jaxpage.params import PoolingParams
from jaxpage.server import embeddings, tokenizing
from jaxpage.server.chat_protocol import chat_request
from jaxpage.server.openapi.answers import answer_schemas
from jaxpage.server.openapi.document import ENDPOINTS, MEANINGS, document
from jaxpage.server.openapi.requests import request_schemas
from jaxpage.server.options import ServerOptions
from jaxpage.server.protocol import completion_request

pytestmark = pytest.mark.anyio
MESSAGES = [{"role": "user", "content": "Hi"}]


class Reading(dict):
    """A body that remembers which of its fields were asked for."""

    def __init__(self, body: dict[str, Any]) -> None:
        super().__init__(body)
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)


def names_read(check: Callable[[Reading], Any], *bodies: dict[str, Any]) -> set[str]:
    """The fields that ``check`` reads in one of the bodies or another."""
    names: set[str] = set()
    for body in bodies:
        reading = Reading(body)
        check(reading)
        names |= reading.names
    return names


def properties(schema: dict[str, Any]) -> set[str]:
    return {name for each in schema.get("anyOf", [schema]) for name in each["properties"]}


@pytest.fixture
def server(api):
    return api.app.state.server


async def test_the_document_says_which_fields_are_read(server):
    described = request_schemas(server.limits, server.model_names)
    beams = {"use_beam_search": True, "n": 2}

    def completion(body: Reading) -> None:
        completion_request(body, server.limits)

    def chat(body: Reading) -> None:
        chat_request(body, server.limits, server.chat)

    def embedding(body: Reading) -> None:
        embeddings.check_embedding(body, server.limits, PoolingParams().pooling)

    def tokenize(body: Reading) -> None:
        tokenizing.tokenize(body, server.limits, server.prompts, server.check_model)

    def detokenize(body: Reading) -> None:
        tokenizing.detokenize(body, server.limits, server.prompts, server.check_model)

    prompt, messages = {"prompt": "Hi"}, {"messages": MESSAGES}
    for component, check, bodies in (
        ("CompletionRequest", completion, (prompt, prompt | beams)),
        ("ChatRequest", chat, (messages, messages | beams)),
        ("EmbeddingRequest", embedding, ({"input": "Hi"},)),
        ("TokenizeRequest", tokenize, (prompt, messages)),
        ("DetokenizeRequest", detokenize, ({"tokens": [1]},)),
    ):
        assert names_read(check, *bodies) == properties(described[component]), component


async def test_every_route_is_described_and_nothing_else(engine, api):
    described = {(endpoint.method.upper(), endpoint.path) for endpoint in ENDPOINTS}
    served = {
        (method, route.path.replace(":path", "")) for route in api.app.routes for method in route.methods - {"HEAD"}
    }
    assert served == described


async def test_guarded_routes_are_those_that_ask_for_the_key(engine):
    api = Api(engine, api_key=("k",))
    operations = (await api.client.get("/openapi.json")).json()["paths"]
    for endpoint in ENDPOINTS:
        operation = operations[endpoint.path][endpoint.method]
        response = await api.client.request(endpoint.method, endpoint.path.replace("{", "").replace("}", ""))
        assert (response.status_code == 401) == endpoint.is_guarded, endpoint.path
        assert ("security" in operation) == endpoint.is_guarded
        assert endpoint.is_guarded or not endpoint.path.startswith("/v1/")


async def test_the_document_is_sound(server, api):
    served = (await api.client.get("/openapi.json")).json()
    assert served == document(server.limits, ServerOptions(), server.model_names)
    for name, schema in served["components"]["schemas"].items():
        Draft202012Validator.check_schema(schema)
        assert name in request_schemas(server.limits, server.model_names) | answer_schemas()
    for operation in (each for path in served["paths"].values() for each in path.values()):
        assert {int(status) for status in operation["responses"]} <= MEANINGS.keys()


async def test_limits_of_the_server_are_in_it(engine):
    engine.max_logprobs = -1
    engine.aliases = ["other"]
    schemas = (await Api(engine, max_n=3).client.get("/openapi.json")).json()["components"]["schemas"]
    fields = schemas["CompletionRequest"]["properties"]
    assert fields["n"] == {"type": ["integer", "null"], "minimum": 1, "maximum": 3}
    assert fields["logprobs"]["minimum"] == -1 and "maximum" not in fields["logprobs"]
    assert fields["max_tokens"]["maximum"] == engine.max_model_len
    assert fields["model"]["anyOf"][0]["enum"] == ["fake", "other"]


@pytest.mark.parametrize("name", ["temperature", "top_p", "n", "seed", "min_p", "logprobs", "max_tokens", "min_tokens"])
async def test_ranges_are_those_of_the_checks(server, name):
    """Just inside a described range is accepted and just outside is refused."""
    schema = request_schemas(server.limits, server.model_names)["CompletionRequest"]["properties"][name]
    step = 1 if "integer" in schema["type"] else 0.001
    inside, outside = [], []
    for bound, sign in (("minimum", 1), ("maximum", -1), ("exclusiveMinimum", 1)):
        if bound in schema:
            strict = bound.startswith("exclusive")
            inside.append(schema[bound] + sign * step * strict)
            outside.append(schema[bound] - sign * step * (not strict))
    assert inside
    for value in inside:
        beams = {"use_beam_search": True} if name == "n" else {}
        echo = {"echo": True} if name == "max_tokens" else {}
        completion_request({"prompt": "Hi", "max_tokens": 64, name: value} | beams | echo, server.limits)
    for value in outside:
        with pytest.raises(ParameterError):
            completion_request({"prompt": "Hi", name: value}, server.limits)
