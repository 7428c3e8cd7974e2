"""How each destination fares by the causes of the verdict."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_delayed.diagnosis import merged
from airflow_delayed.ui.models import LatenessResponse
from airflow_delayed.ui.verdict import Cause, _by_destination, _joined


def late(destination: str, overdue: int = 0) -> LatenessResponse:
    """A destination that got a message a minute ago."""
    return LatenessResponse(
        conn_id="rabbit",
        destination=destination,
        overdue=overdue,
        late_seconds=30.0 * overdue,
        dispatched=1,
        p99_seconds=0.1,
    )


def cause(code: str, severity: str = "error", **values: Any) -> Cause:
    given = {
        "connection_id": "store",
        "kind": "store",
        "queue": None,
        "deliver_conn_id": "rabbit",
        "remedy": None,
        **values,
    }
    return Cause(code=code, severity=severity, where="x", what="y", **given)


def statuses(*causes: Cause) -> dict[str, str]:
    found = _by_destination({"store": [late("orders", overdue=1), late("emails")]}, causes)
    return {one.destination: one.status for one in found}


@pytest.mark.parametrize("code", ["connection-fails", "no-dispatcher"])
def test_what_keeps_a_connection_keeps_also_what_is_not_overdue_yet(code: str) -> None:
    assert statuses(cause(code)) == {"orders": "failing", "emails": "failing"}


def test_a_warning_that_no_dispatcher_comes_keeps_what_is_overdue_alone() -> None:
    assert statuses(cause("no-dispatcher", "warning")) == {"orders": "late", "emails": "delivering"}


def test_a_dispatcher_that_fails_keeps_what_is_overdue() -> None:
    assert statuses(cause("dispatcher-fails", deliver_conn_id=None)) == {"orders": "failing", "emails": "delivering"}


def test_an_error_of_a_broker_says_what_messages_that_stay_in_its_levels_follow_from() -> None:
    missing = cause("missing", connection_id="rabbit", kind="rabbitmq", deliver_conn_id=None)
    warning = cause("stuck", "warning", connection_id="rabbit", kind="rabbitmq", deliver_conn_id=None)
    assert statuses(missing, warning) == {"orders": "late", "emails": "delivering"}
    assert [one.code for _, one in merged([("rabbit", warning), ("rabbit", missing)], _joined)] == ["missing"]


@pytest.mark.parametrize("pause", [{"destination": "emails"}, {"deliver_conn_id": "rabbit"}])
def test_a_pause_is_of_a_destination_or_of_all_of_a_connection(pause: dict[str, str]) -> None:
    paused = cause("paused", "warning", destination=None, deliver_conn_id=None, pause=pause)
    of_orders = "late" if "destination" in pause else "paused"
    assert statuses(paused) == {"orders": of_orders, "emails": "paused"}
