"""Requests that schemathesis makes up from the served description: documented statuses and bodies, no faults."""

from __future__ import annotations

import pytest
import schemathesis
from fake_engine import FakeEngine
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from jaxpage.server.app import create_app
from jaxpage.server.openapi.document import ENDPOINTS

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


CASES = [
    pytest.param(endpoint, mode, id=f"{endpoint.method} {endpoint.path} {mode.value}")
    for endpoint in ENDPOINTS
    for mode in GenerationMode
    if endpoint.path != "/live"  # it never ends
    and (mode is GenerationMode.POSITIVE or endpoint.body is not None)
]


@pytest.fixture(scope="module")
def description(bytes_tokenizer):
    """What the app around a fake engine says of itself."""
    engine = FakeEngine(bytes_tokenizer, [268, 269, 274])
    return schemathesis.openapi.from_asgi("/openapi.json", create_app(engine))


@pytest.mark.parametrize(("endpoint", "mode"), CASES)
def test_made_up_requests(description, endpoint, mode):
    operation = description[endpoint.path][endpoint.method]

    @settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=mode))
    def check(case):
        case.call_and_validate(checks=CHECKS)

    check()
