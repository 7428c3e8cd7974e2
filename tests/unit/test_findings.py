from __future__ import annotations

import pytest

from airflow_delayed.delivery import Finding, State, TopologyReport


@pytest.mark.parametrize(
    "state, severity",
    [
        (State.OK, "ok"),
        (State.CREATED, "ok"),
        (State.MISSING, "error"),
        (State.DIFFERS, "error"),
        (State.BLOCKED, "error"),
        (State.WARNING, "warning"),
        (State.UNKNOWN, "unknown"),
    ],
)
def test_a_severity_is_that_of_the_report(state, severity):
    finding = Finding(state=state, resource="queue orders", found="full")
    assert finding.severity == severity
    assert TopologyReport((finding,)).ok == (severity != "error")


def test_the_log_says_where_what_and_what_to_do():
    finding = Finding(
        state=State.BLOCKED, resource="queue orders", found="full", code="destination-full", remedy="consume it"
    )
    assert str(finding) == "queue orders: full. What to do: consume it"
    assert finding.to_json() == {
        "code": "destination-full",
        "severity": "error",
        "where": "queue orders",
        "what": "full",
        "remedy": "consume it",
    }


def test_a_finding_without_a_code_is_named_by_its_state():
    difference = Finding(state=State.DIFFERS, resource="queue orders", argument="durable", wanted=True, found=False)
    assert difference.to_json()["code"] == "differs"
    assert difference.to_json()["where"] == "queue orders durable"
    assert difference.to_json()["what"] == "wanted True, found False"
