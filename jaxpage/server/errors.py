"""Owns how faults become HTTP answers: status, type and JSON body.

It knows neither routes nor what the endpoints do.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from jaxpage.errors import EngineDeadError, ParameterError

logger = logging.getLogger("jaxpage.server")

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "PayloadTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


class ApiError(Exception):
    """A request that ends with an error answer.

    Attributes:
        status: HTTP status; also the ``code`` of the body.
        parameter: dotted path of the field at fault, or None.
        headers: further headers of the answer.
    """

    def __init__(
        self, status: int, message: str, parameter: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.parameter = parameter
        self.headers = dict(headers or {})


class ClientGoneError(Exception):
    """The client closed the connection: nobody is left to answer."""


class GenerationError(Exception):
    """The engine ended this request alone without a result."""


def unavailable(message: str) -> ApiError:
    """503, with the hint to come back in a second."""
    return ApiError(503, message, headers={"Retry-After": "1"})


def to_api_error(error: BaseException) -> ApiError:
    """The answer for ``error``. An unforeseen one is logged and answered with a fixed text that gives nothing away."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ParameterError):
        # Messages carry the index ("prompt[3]"), ``param`` is the plain path of the field.
        return ApiError(400, str(error), re.sub(r"\[\d+\]", "", error.parameter))
    if isinstance(error, EngineDeadError):
        return ApiError(503, "the engine has stopped")
    if isinstance(error, HTTPException):
        details = {404: "there is no such route", 405: "the method is not allowed for this route"}
        return ApiError(error.status_code, details.get(error.status_code, str(error.detail)), headers=error.headers)
    if isinstance(error, GenerationError):
        return ApiError(500, str(error))
    logger.error("internal error", exc_info=error)
    return ApiError(500, "internal error; the server's log has the details")


def error_body(error: ApiError) -> dict[str, Any]:
    """The JSON object that clients read, for the body and for streams."""
    kind = TYPES.get(error.status, "BadRequestError" if error.status < 500 else "InternalServerError")
    return {"error": {"message": error.message, "type": kind, "param": error.parameter, "code": error.status}}


def error_response(error: ApiError) -> Response:
    """The complete answer for ``error``."""
    return JSONResponse(error_body(error), status_code=error.status, headers=error.headers)
