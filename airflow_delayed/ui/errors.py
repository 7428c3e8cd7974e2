"""Errors as answers of the API: never more of an error than the user may read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from airflow.sdk.exceptions import AirflowException
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from airflow_delayed.errors import DelayedError, InputError, MissingExtra, TopologyError, TransportUnavailable
from airflow_delayed.ui.hook_pool import Busy, TooSlow
from airflow_delayed.ui.models import ApiModel

#: Seconds after which a client may repeat a request that was refused as one too many.
RETRY_AFTER = "5"

ErrorCode = Literal[
    "login",
    "forbidden",
    "absent",
    "invalid",
    "cross_site",
    "not_json",
    "unreachable",
    "too_slow",
    "busy",
    "not_ready",
    "conflict",
    "internal",
    "closed",
]


class ErrorInfo(ApiModel):
    """An error: a code for programs, and a text for people that says what to do."""

    code: ErrorCode
    message: str


class ErrorResponse(ApiModel):
    """The body of each answer whose status is 400 or more."""

    error: ErrorInfo


class RefusedRequest(HTTPException):
    """A request that is refused with a code that does not follow from its status."""

    def __init__(self, status: int, code: ErrorCode, message: str) -> None:
        super().__init__(status, message)
        self.code: ErrorCode = code


@dataclass(frozen=True, slots=True)
class ApiError:
    """One error as the API answers it.

    :param sensitive: its text may name hosts and users, which only users who may read the connection may read.
    """

    status: int
    code: ErrorCode
    message: str
    sensitive: bool = False

    def without_details(self, connection_id: str) -> ApiError:
        """Return the same error for users who may not read the connection."""
        text = f"connection {connection_id!r} cannot be used; the api-server's log says why"
        return replace(self, message=text, sensitive=False)

    def response(self, headers: Mapping[str, str] | None = None) -> JSONResponse:
        """Return the answer."""
        body = ErrorResponse(error=ErrorInfo(code=self.code, message=self.message))
        if self.code == "busy":
            headers = {**(headers or {}), "Retry-After": RETRY_AFTER}
        return JSONResponse(body.model_dump(), self.status, headers)


INTERNAL = ApiError(500, "internal", "Something went wrong; the api-server's log says what")

#: The first class that fits counts.
_KNOWN: tuple[tuple[type[Exception], int, ErrorCode, bool], ...] = (
    (TooSlow, 504, "too_slow", False),
    (Busy, 503, "busy", False),
    (TransportUnavailable, 503, "unreachable", True),
    (TopologyError, 409, "not_ready", False),
    (MissingExtra, 409, "not_ready", False),
    (InputError, 400, "invalid", False),
    (DelayedError, 409, "conflict", True),
    # a connection that Airflow does not know, or a library that no extra brings
    (AirflowException, 409, "not_ready", True),
    (ImportError, 409, "not_ready", True),
)
#: ErrorCodes of the statuses that Airflow and FastAPI themselves answer.
_CODES: Mapping[int, ErrorCode] = {401: "login", 403: "forbidden", 404: "absent"}
_MOMENT = "must be a date and time with a zone, such as 2030-01-31T12:00:00Z"
#: What is wrong with a field, by how the kind of the validation library's error begins.
_WRONG: Mapping[str, str] = {
    "missing": "is missing",
    "extra_forbidden": "is not known",
    "literal_error": "must be {expected}",
    "date": _MOMENT,
    "timezone": _MOMENT,
    "string_too_long": "may have {max_length} characters at most",
    "string_too_short": "is empty",
    "string_pattern_mismatch": "has a character that it may not have",
    "string_type": "must be text",
    "too_long": "may have {max_length} entries at most",
    "too_short": "is empty",
    "greater_than_equal": "must be {ge} or more",
    "less_than_equal": "must be {le} or less",
    "int": "must be a whole number",
    "float": "must be a number",
    "finite_number": "must be a number",
    "bool": "must be true or false",
    "list_type": "must be a list",
    "model": "must be an object",
    "json_invalid": "is no JSON",
}


def api_error(error: Exception) -> ApiError | None:
    """Return an exception as an error of the API; None: an exception that nobody expected."""
    for kind, status, code, sensitive in _KNOWN:
        if isinstance(error, kind):
            return ApiError(status, code, str(error), sensitive)
    return None


def _problems(errors: Sequence[Any]) -> list[str]:
    """Return what is wrong, by field; without the request's values, which could be anything."""
    problems: dict[str, None] = {}
    wrong: dict[str, dict[str, None]] = {}
    for one in errors:
        place, kind, details = one["loc"], one["type"], one.get("ctx") or {}
        # a list of one of two types is in the place by its type
        field = ".".join(part for part in place[1:] if isinstance(part, str) and part.isidentifier())
        if kind == "value_error":
            problems[f"{field}: {details['error']}" if field else str(details["error"])] = None
        else:
            text = next((text for name, text in _WRONG.items() if kind.startswith(name)), "is not valid")
            wrong.setdefault(field or place[0], {})[text.format(**details)] = None
    return [*problems, *(f"{field} {' or '.join(texts)}" for field, texts in wrong.items())]


def answer_errors(app: FastAPI) -> None:
    """Give the errors that FastAPI and Airflow raise the form of all other errors."""

    async def refused(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        code = error.code if isinstance(error, RefusedRequest) else _CODES.get(error.status_code, "invalid")
        return ApiError(error.status_code, code, str(error.detail)).response(error.headers)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return ApiError(400, "invalid", "; ".join(_problems(error.errors())[:5])).response()

    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(RequestValidationError, invalid)
