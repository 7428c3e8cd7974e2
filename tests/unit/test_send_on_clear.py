"""What a DelayedSendOperator that is cleared sends, and its durations and contradictions."""

from __future__ import annotations

from datetime import timedelta

import pytest
from airflow.sdk.exceptions import AirflowFailException
from support.send_runs import NOW, rows

from airflow_delayed.errors import SendFailed

HOUR = timedelta(hours=1)
MINUTE = timedelta(minutes=1)


def test_killed_while_it_sends_it_tells_what_cannot_be_recalled(run, log):
    run.task(messages=rows(3)).on_kill()
    assert "cannot be recalled" not in log.text
    task = run.task(messages=rows(3))
    run.transport.fail_after = 2
    with pytest.raises(SendFailed):
        task.execute(run.context)
    task.on_kill()
    assert "at least 2 messages were sent, which cannot be recalled" in log.text


@pytest.mark.parametrize("on_clear", ["same_ids", "new_ids"])
def test_cleared_task_means_the_same_ids_or_new_ones(run, on_clear):
    def ids():
        run.transport.sent.clear()
        run.execute(messages=rows(3), on_clear=on_clear)
        return {message.message_id: message.due_at for message in run.transport.sent}

    first = ids()
    run.clear()
    run.now += MINUTE
    cleared = ids()
    if on_clear == "same_ids":
        assert cleared == first
    else:
        assert not cleared.keys() & first.keys()
        assert min(cleared.values()) == run.now + MINUTE  # relative delays count anew


def test_a_retry_of_a_cleared_task_means_the_new_ids(run):
    run.execute(messages=rows(3), on_clear="new_ids")
    run.transport.sent.clear()
    run.clear()
    run.transport.fail_after = 2
    with pytest.raises(SendFailed):
        run.execute(messages=rows(3), on_clear="new_ids")
    new = run.ids()
    run.transport.sent.clear()
    run.transport.fail_after = None
    run.now += MINUTE
    run.execute(messages=rows(3), on_clear="new_ids")
    assert run.ids()[:2] == new


def test_cleared_for_new_ids_it_sends_nothing_stale_whatever_became_of_the_first(run):
    parameters = {"value": "x", "due_at": NOW + MINUTE, "on_clear": "new_ids"}
    run.transport.fail_after = 0
    with pytest.raises(SendFailed):
        run.execute(**parameters)
    run.transport.fail_after = None
    run.clear()
    run.now += timedelta(days=30)
    with pytest.raises(AirflowFailException, match="were due more than"):
        run.execute(**parameters)


def test_new_ids_of_a_cleared_task_are_new_also_where_times_are_absolute(run):
    parameters = {"value": "x", "due_at": NOW + HOUR, "on_clear": "new_ids"}
    run.execute(**parameters)
    run.clear()
    run.execute(**parameters)
    assert len(set(run.ids())) == 2


def test_spans_may_be_iso_durations(run):
    run.execute(value="x", delay="PT1H10M", store_conn_id="store", hold_over="PT2H")
    assert [message.due_at for message in run.transport.sent] == [NOW + HOUR + 10 * MINUTE]
    with pytest.raises(AirflowFailException, match="were due more than 12:00:00 before"):
        run.execute(value="x", due_at=NOW - 13 * HOUR, max_past="PT12H")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"value": "x", "spread": 5}, "spread=5 must be a timedelta or an ISO 8601 duration such as 'PT10M'"),
        ({"value": "x", "spread": -MINUTE}, "not negative"),
        ({"value": "x", "spread": "P1M"}, "'P1M' has months or years"),
        ({"value": "x", "hold_over": "10"}, "hold_over='10' must be a timedelta"),
        ({"value": "x", "on_clear": "never"}, "on_clear='never' is none of 'same_ids', 'new_ids'"),
        ({"value": "x", "on_clear": "new_ids", "message_id": "m"}, "has no power over ids"),
        ({"messages": [], "on_clear": "new_ids", "id_columns": ["a"]}, "has no power over ids"),
    ],
)
def test_contradiction_is_an_error_when_the_dag_is_parsed(run, arguments, says):
    with pytest.raises(ValueError, match=says):
        run.task(**arguments)
