"""Rows that are nested too deep or hold numbers without end: one row is rejected, and the others are sent."""

from __future__ import annotations

import json
from datetime import datetime

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.send_runs import Run

from airflow_delayed.intake.columns import RowRules, batch_of
from airflow_delayed.intake.rows import Problem, RowReader
from airflow_delayed.intake.sources import Rejects
from airflow_delayed.message import UTC

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
GOOD = {"value": "x", "delay_seconds": 1}


def nested(depth, opening="[", closing="]"):
    return opening * depth + closing * depth


def deep_list(depth):
    found = []
    for _ in range(depth - 1):
        found = [found]
    return found


@pytest.fixture
def sent(monkeypatch, tmp_path):
    """Send as a task does, rejecting what is wrong; return the bodies that were sent and the rejected rows."""

    def send(**parameters):
        run = Run(monkeypatch)
        run.transport.check = lambda message, now: None
        rejects = tmp_path / "rejects.jsonl"
        task = run.task(
            rejects=str(rejects),
            **({**parameters, "messages": []} if "messages" in parameters else parameters),
        )
        # as what another task has returned takes its place
        task.messages = parameters.get("messages")
        # as what another task has returned is not rendered
        task.render_template = lambda content, context: content
        run.try_number = 1
        task.execute(run.context)
        rejected = [json.loads(line) for line in rejects.read_text().splitlines()] if rejects.exists() else []
        return [message.body for message in run.transport.sent], rejected

    return send


@pytest.mark.parametrize("depth", [201, 300, 500, 800, 900, 950, 980, 985, 990, 992, 995, 1000, 2000, 100_000])
@pytest.mark.parametrize("brackets", [("[", "]"), ('{"a":', "}")])
def test_a_line_that_is_nested_too_deep_is_rejected_as_it_was(sent, tmp_path, depth, brackets):
    opening, closing = brackets
    content = opening * depth + ("1" if opening != "[" else "") + closing * depth
    line = f'{{"value": {content}, "delay_seconds": 1}}'
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(GOOD)}\n{line}\n{json.dumps(GOOD | {'value': 'y'})}\n")
    bodies, [rejected] = sent(source=str(tmp_path / "rows.jsonl"))
    assert bodies == [b"x", b"y"]
    assert rejected["line"] == line
    assert rejected["rejected"]["column"] == "line"


def test_what_is_nested_less_deep_is_sent(sent, tmp_path):
    (tmp_path / "rows.jsonl").write_text(f'{{"value": {nested(199)}, "delay_seconds": 1}}')
    assert sent(source=str(tmp_path / "rows.jsonl")) == ([nested(199).encode()], [])
    assert sent(messages=[{"value": deep_list(200), "delay_seconds": 1}]) == ([nested(200).encode()], [])


@pytest.mark.parametrize("depth", [201, 500, 900, 990, 5000])
@pytest.mark.parametrize("field", ["value", "headers", "tag", "destination", "due_at", "unknown"])
def test_a_message_of_a_list_that_is_nested_too_deep_is_rejected(sent, depth, field):
    bodies, [rejected] = sent(messages=[GOOD, {**GOOD, field: deep_list(depth)}, {**GOOD, "value": "y"}])
    assert bodies == [b"x", b"y"]
    assert rejected["rejected"]["place"] == "messages row 2"


@pytest.mark.parametrize("field", ["value", "delay_seconds", "headers", "order", "unknown"])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_whole_number_without_end_is_rejected(sent, field, sign):
    number = sign * 10**5000
    rows = [
        {"order": 1, **GOOD},
        {"order": 2, **GOOD, field: {"n": number} if field in ("value", "headers") else number},
    ]
    bodies, [rejected] = sent(messages=rows, id_columns=["order"])
    assert bodies == [b"x"]
    assert rejected["rejected"]["place"] == "messages row 2"


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.decimals()
    | st.fractions()
    | st.text(st.characters(exclude_categories=[]))
    | st.binary()
    | st.datetimes()
    | st.integers(300, 5000).map(lambda digits: 10**digits),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=6,
)
COLUMNS = ("value", "destination", "due_at", "delay_seconds", "headers", "message_id", "tag", "expires_at", "order")


@pytest.mark.fuzz
@given(
    st.lists(st.dictionaries(st.sampled_from(COLUMNS), ANYTHING, max_size=5), max_size=3),
    st.sampled_from([(), ("order",)]),
)
def test_whatever_a_row_holds_it_is_a_message_or_a_problem_that_can_be_written(rows, id_columns):
    reader = RowReader(RowRules(anchor=NOW, destination="mail", id_columns=id_columns))
    found = list(reader.read(batch_of(rows, "rows")))
    assert len(found) == len(rows)
    with Rejects(fsspec.filesystem("memory"), "/hostile-rows/rejects.jsonl", "run") as rejects:
        for one in found:
            if isinstance(one, Problem):
                rejects.add(one)
                assert len(str(one)) < 1000
