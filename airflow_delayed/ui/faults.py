"""What can go wrong, as an answer: never more of it than a user may read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from airflow.sdk.exceptions import AirflowException
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from airflow_delayed.errors import DelayedError, InputError, TopologyError, TransportUnavailable
from airflow_delayed.ui.models import Code, Fault, FaultAnswer
from airflow_delayed.ui.patience import Busy, TooSlow


class Refused(HTTPException):
    """A request that is refused for a reason of its own."""

    def __init__(self, status: int, code: Code, message: str) -> None:
        super().__init__(status, message)
        self.code: Code = code


@dataclass(frozen=True, slots=True)
class Found:
    """One fault.

    :param tells_where: its text may name hosts and users, which only those may read who may read the connection.
    """

    status: int
    code: Code
    message: str
    tells_where: bool = False

    def without_details(self, connection_id: str) -> Found:
        """Return the same for those who may not read the connection."""
        text = f"connection {connection_id!r} cannot be used; the api-server's log says why"
        return replace(self, message=text, tells_where=False)


#: Seconds after which a request that was refused as one too many may be made again.
RETRY_AFTER = "5"
UNKNOWN = Found(500, "internal", "Something went wrong; the api-server's log says what")

#: The first that fits.
_KNOWN: tuple[tuple[type[Exception], int, Code, bool], ...] = (
    (TooSlow, 504, "too_slow", False),
    (Busy, 503, "busy", False),
    (TransportUnavailable, 503, "unreachable", True),
    (TopologyError, 409, "not_ready", False),
    (InputError, 400, "invalid", False),
    (DelayedError, 409, "conflict", True),
    # a connection that Airflow does not know, or a client that is not installed beside the api-server
    (AirflowException, 409, "not_ready", True),
    (ImportError, 409, "not_ready", True),
)
#: What Airflow and FastAPI themselves answer.
_CODES: Mapping[int, Code] = {401: "login", 403: "forbidden", 404: "absent"}


def fault_of(error: Exception) -> Found | None:
    """Return the fault that an error is; None: none that was foreseen."""
    for kind, status, code, tells_where in _KNOWN:
        if isinstance(error, kind):
            return Found(status, code, str(error), tells_where)
    return None


def refusal(error: HTTPException) -> Found:
    """Return what a web error says."""
    code = error.code if isinstance(error, Refused) else _CODES.get(error.status_code, "invalid")
    return Found(error.status_code, code, str(error.detail))


def invalid(error: RequestValidationError) -> Found:
    """Return what is wrong with a request, without its values, which could be anything."""
    told = [f"{'.'.join(str(part) for part in one['loc'])}: {one['msg']}" for one in error.errors()]
    return Found(400, "invalid", "; ".join(told[:5]))


def answer(found: Found, *, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return the answer for a fault."""
    body = FaultAnswer(error=Fault(code=found.code, message=found.message))
    if found.code == "busy":
        headers = {**(headers or {}), "Retry-After": RETRY_AFTER}
    return JSONResponse(body.model_dump(), found.status, headers)
