"""What the verdict takes from a verification of RabbitMQ's delay levels."""

from __future__ import annotations

import pytest

from airflow_delayed.delivery import Finding, State, TopologyReport
from airflow_delayed.ui import api_brokers


class Transport:
    """Answers as a broker with these findings."""

    def __init__(self, *findings: Finding) -> None:
        self.verify = lambda destinations: TopologyReport(findings)

    def close(self) -> None:
        pass


def differs(number: int) -> Finding:
    return Finding(
        state=State.DIFFERS,
        resource=f"queue delayed.hex.000000{number}",
        argument="x-queue-type",
        wanted="quorum",
        found="classic",
        code="differs",
    )


def test_what_is_missing_or_differs_is_taken_once_for_each_kind(monkeypatch: pytest.MonkeyPatch):
    transport = Transport(
        # without a management API
        Finding(state=State.UNKNOWN, resource="bindings", found="it cannot be reached", code="missing"),
        Finding(state=State.MISSING, resource="exchange delayed.hex.last-1"),
        # in the figures already
        Finding(state=State.BLOCKED, resource="queues", found="no quorum", code="no-leader"),
        *map(differs, range(3)),
        Finding(state=State.MISSING, resource="binding a -> b", code="missing"),
    )
    monkeypatch.setattr(api_brokers, "delivery_for", lambda conn_id: transport)
    missing, argument = api_brokers._differing("rabbit")
    assert (missing.code, missing.where) == ("missing", "exchange delayed.hex.last-1, and 1 others")
    assert "airflow delayed install --conn-id rabbit" in str(missing.remedy)
    assert argument.where == "queue delayed.hex.0000000 x-queue-type, and 2 others"
    assert argument.what == "wanted 'quorum', found 'classic'"
    assert "replace=True" in str(argument.remedy)
