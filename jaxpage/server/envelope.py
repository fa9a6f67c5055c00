"""Owns what surrounds every answer: the request id, the count of requests in flight, an error body for every fault.

It must not know routes or what they answer.
"""

from __future__ import annotations

import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxpage.server.errors import ClientGoneError, error_response, to_api_error
from jaxpage.server.protocol import REQUEST_ID
from jaxpage.server.state import ApiServer


class Envelope:
    """The layer that gives every answer an id and counts every generating request."""

    def __init__(self, app: ASGIApp, server: ApiServer) -> None:
        self._app = app
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        state = scope.setdefault("state", {})
        state["has_client_id"] = REQUEST_ID.fullmatch(given) is not None
        state["request_id"] = given if state["has_client_id"] else secrets.token_hex(16)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", []), (b"x-request-id", state["request_id"].encode())]
                message = {**message, "headers": headers}
            await send(message)

        path = scope["path"].removeprefix(scope.get("root_path", ""))
        counted = scope["method"] == "POST" and path.startswith("/v1/")
        self._server.num_in_flight += counted
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._server.num_in_flight -= counted
            self._server.admission.release(state.get("ticket"))


class Faults:
    """The layer that turns every exception into an error answer, unless the answer has begun."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except ClientGoneError:
            pass  # what it started has been aborted on the way here
        except Exception as error:
            answer = to_api_error(error)
            if not started:
                await error_response(answer)(scope, receive, watched_send)
