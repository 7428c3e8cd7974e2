from __future__ import annotations

import re
from datetime import datetime, timezone
from pathlib import Path

import pytest

from airflow_delayed.delivery import Finding, SendReport, State, TopologyReport
from airflow_delayed.diagnosis import no_answer
from airflow_delayed.ui import verdict


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


def test_a_report_of_many_parts_is_a_line_and_what_differs():
    kinds = ["exchange", "queue", "binding"]
    made = [Finding(state=State.CREATED, resource=f"{kinds[number % 3]} level-{number}") for number in range(1200)]
    mail = Finding(state=State.CREATED, resource="queue mail", destination="mail")
    old = Finding(state=State.DIFFERS, resource="queue level-7", argument="durable", wanted=True, found=False)
    risk = Finding(state=State.WARNING, resource="node a", found="its clock is 9 s behind", remedy="set it")
    report = TopologyReport((*made, mail, old, risk, Finding(state=State.OK, resource="queue q")))
    assert str(report) == (
        "1,201 created (queue: 401, binding: 400, exchange: 400; for mail), 1 differs, 1 warning, 1 ok (queue q)\n"
        "queue level-7 durable: wanted True, found False\n"
        "node a: its clock is 9 s behind. What to do: set it"
    )
    assert (report.notable, str(TopologyReport())) == ((old, risk), "nothing")


def test_few_parts_are_named():
    parts = [Finding(state=State.PLANNED, resource=name) for name in ("queue orders", "queue orders-delay.fifo")]
    assert str(TopologyReport(tuple(parts))) == "2 would create (queue orders, queue orders-delay.fifo)"
    went = Finding(state=State.DELETED, resource="queue q", why="3 messages went with it")
    assert str(TopologyReport((went,))) == "1 deleted\nqueue q: deleted (3 messages went with it)"


def test_the_report_of_a_send_is_a_line():
    due = datetime(2026, 6, 5, 7, 30, tzinfo=timezone.utc)
    counts = {f"q{number}": number for number in range(1, 11)}
    report = SendReport(55, 3, 1, 0, due, due, counts)
    assert str(report) == (
        "55 sent (q10: 10, q9: 9, q8: 8, q7: 7, q6: 6, q5: 5, q4: 4, q3: 3, and 2 more),"
        " due from 2026-06-05T07:30:00+00:00 to 2026-06-05T07:30:00+00:00; 3 duplicates; 1 replaced"
    )
    assert str(SendReport()) == "0 sent"


@pytest.mark.parametrize(
    "text, silent, settings",
    [
        ("nothing listens on that host and port", False, True),
        ("the login was refused; check user and password", False, True),
        ("no answer in time", True, True),
        ("as many connections as it may have: raise its limit max-connections", False, False),
    ],
)
def test_the_page_offers_to_edit_a_connection_by_these_words_of_its_remedy(text: str, silent: bool, settings: bool):
    script = (Path(verdict.__file__).parent / "static" / "verdict.js").read_text()
    (words,) = re.findall('const OF_SETTINGS = "(.+)";', script)
    finding = no_answer("rabbit", text, away=True, silent=silent)
    assert (words in str(finding.remedy)) is settings
