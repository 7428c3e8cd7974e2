"""DelayedSendOperator that waits until its first message is nearly due, and then sends."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from airflow.sdk.exceptions import AirflowFailException, TaskDeferred
from support.recorder import Recorder
from support.send_runs import NOW, Run, rows

from airflow_delayed.errors import LimitExceeded, SendFailed

HOUR = timedelta(hours=1)
MINUTE = timedelta(minutes=1)


class Short(Recorder):
    """A transport that refuses what is due in over a quarter of an hour, as SQS does."""

    def __init__(self):
        super().__init__(horizon=timedelta(seconds=870))

    def check(self, message, now):
        super().check(message, now)
        if message.due_at - now > timedelta(seconds=900):
            raise LimitExceeded("due_at", "is too far")


def deferred(run: Run, **arguments):
    """Try it once and return the trigger that it waits for."""
    with pytest.raises(TaskDeferred) as caught:
        run.execute(deferrable=True, **arguments)
    assert caught.value.method_name == "resume"
    assert not run.transport.sent
    return caught.value.trigger


def resumed(run: Run, **arguments):
    return run.task(deferrable=True, **arguments).resume(run.context, event=None)


def test_waits_in_the_triggerer_until_the_lead_and_sends_then(run):
    parameters = {"messages": rows(3, delay_seconds=None, due_at=NOW + 5 * HOUR), "lead": MINUTE}
    trigger = deferred(run, **parameters)
    assert (trigger.moment, trigger.lead) == (NOW + 5 * HOUR, MINUTE)
    run.now = NOW + 5 * HOUR - MINUTE
    assert resumed(run, **parameters)["sent"] == 3
    assert run.slept == []


def test_one_trigger_for_a_batch_and_no_body_in_it(run):
    messages = [{"value": f"secret {hours}", "delay_seconds": hours * 3600} for hours in (7, 3, 5)]
    trigger = deferred(run, messages=messages, headers={"h": "hidden"}, lead=MINUTE)
    assert trigger.moment == NOW + 3 * HOUR
    _, arguments = trigger.serialize()
    assert "secret" not in json.dumps(arguments)
    assert "hidden" not in json.dumps(arguments)


def test_relative_delays_count_from_before_the_wait(run):
    parameters = {"value": "x", "delay": 5 * HOUR, "lead": MINUTE}
    deferred(run, **parameters)
    run.now += 5 * HOUR
    resumed(run, **parameters)
    assert run.transport.sent[0].due_at == NOW + 5 * HOUR


def test_before_airflow_3_3_the_wait_takes_along_what_relative_delays_count_from(run):
    context = {"ti": run.context["ti"]}
    task = run.task(value="x", delay=5 * HOUR, lead=MINUTE, deferrable=True)
    with pytest.raises(TaskDeferred) as caught:
        task.execute(context)
    run.now += 5 * HOUR
    # in the database it is JSON
    assert task.resume(context, event=None, **json.loads(json.dumps(caught.value.kwargs)))["sent"] == 1
    assert run.transport.sent[0].due_at == NOW + 5 * HOUR


def test_woken_early_it_waits_anew(run):
    parameters = {"value": "x", "delay": 5 * HOUR, "lead": MINUTE}
    deferred(run, **parameters)
    run.now += HOUR
    with pytest.raises(TaskDeferred) as caught:
        resumed(run, **parameters)
    assert caught.value.trigger.moment == NOW + 5 * HOUR
    assert run.transport.sent == []
    # by a clock that goes a little behind the triggerer's, it is not worth another wait there
    run.now = NOW + 5 * HOUR - MINUTE - timedelta(seconds=2)
    assert resumed(run, **parameters)["sent"] == 1
    assert sum(run.slept) == 2


def test_resumed_hours_late_it_still_sends_what_it_has_waited_for(run):
    parameters = {"value": "x", "delay": 5 * HOUR, "lead": MINUTE}
    deferred(run, **parameters)
    run.now += 30 * HOUR
    assert resumed(run, **parameters)["sent"] == 1


def test_marked_failed_while_it_waits_and_cleared_a_month_later_it_sends_nothing_stale(run):
    parameters = {"value": "x", "due_at": NOW + 5 * HOUR, "lead": MINUTE}
    deferred(run, **parameters)
    run.clear()
    run.now += timedelta(days=30)
    with pytest.raises(AirflowFailException, match="were due more than"):
        run.execute(**parameters)
    assert run.transport.sent == []


def test_cleared_after_its_send_failed_it_still_sends_what_has_fallen_due_meanwhile(run):
    parameters = {"value": "x", "delay": 5 * HOUR, "lead": MINUTE}
    deferred(run, **parameters)
    run.now += 5 * HOUR
    run.transport.fail_after = 0
    with pytest.raises(SendFailed):
        resumed(run, **parameters)
    run.transport.fail_after = None
    run.clear()
    run.now += 5 * HOUR  # the broker was repaired
    assert run.execute(**parameters)["sent"] == 1


def test_what_is_wrong_is_told_before_the_wait(run):
    far = {"due_at": NOW + 5 * HOUR, "lead": MINUTE, "deferrable": True}
    with pytest.raises(AirflowFailException, match="limit is 100"):
        run.execute(value="y" * 101, **far)
    with pytest.raises(AirflowFailException, match="no destination voice"):
        run.execute(value="x", destination="voice", **far)


def test_what_the_transport_would_refuse_now_is_judged_by_when_it_is_sent(run, log):
    run.transport = Short()
    far = {"value": "x", "due_at": NOW + 5 * HOUR}
    with pytest.raises(AirflowFailException, match="is too far"):
        run.execute(**far)
    trigger = deferred(run, **far, lead=HOUR)
    assert trigger.lead == timedelta(seconds=870)
    assert "lead is 0:14:30 here" in log.text
    run.now = trigger.moment - trigger.lead
    assert resumed(run, **far, lead=HOUR)["sent"] == 1


def test_rows_that_have_changed_meanwhile_are_read_and_checked_again(run, tmp_path):
    source = tmp_path / "rows.jsonl"
    parameters = {"source": str(source), "lead": MINUTE}
    source.write_text(json.dumps({"value": "old", "due_at": f"{NOW + HOUR}"}))
    deferred(run, **parameters)
    run.now += HOUR - MINUTE
    source.write_text(json.dumps({"value": "new", "due_at": f"{NOW + 2 * HOUR}"}))
    with pytest.raises(TaskDeferred) as caught:
        resumed(run, **parameters)
    assert caught.value.trigger.moment == NOW + 2 * HOUR
    run.now += HOUR
    resumed(run, **parameters)
    assert [message.body for message in run.transport.sent] == [b"new"]


def test_near_or_past_it_is_sent_at_once(run):
    soon = [{"value": str(minutes), "due_at": NOW + minutes * MINUTE} for minutes in (600, -5, 50)]
    assert run.execute(messages=soon, lead=MINUTE, deferrable=True)["sent"] == 3
    # what is skipped is not waited for, and neither keeps the others from waiting
    stale = [{"value": "x", "due_at": NOW - 2 * HOUR}, {"value": "y", "due_at": NOW + 2 * HOUR}]
    run.transport.sent.clear()
    assert deferred(run, messages=stale, past_due="skip", lead=MINUTE).moment == NOW + 2 * HOUR


def test_nothing_to_send_is_not_waited_for(run):
    assert run.execute(messages=[], lead=MINUTE, deferrable=True)["sent"] == 0


def test_a_wait_of_seconds_is_no_deferral(run):
    parameters = {"value": "x", "due_at": NOW + MINUTE + timedelta(seconds=8), "lead": MINUTE}
    assert run.execute(**parameters, deferrable=True)["sent"] == 1
    assert sum(run.slept) == 8


def test_without_a_triggerer_it_waits_on_the_worker(run):
    assert run.execute(value="x", delay=5 * HOUR, lead=MINUTE)["sent"] == 1
    assert run.now == NOW + 5 * HOUR - MINUTE
    assert run.transport.closed >= 2  # none is kept open meanwhile


def test_without_a_lead_nothing_waits_whatever_is_deferrable(run):
    assert run.execute(value="x", delay=5 * HOUR, deferrable=True)["sent"] == 1
    assert run.now == NOW


def test_it_waits_in_the_triggerer_by_default_where_airflow_says_so(fresh):
    assert fresh["deferrable by default"] == [True, True]


def test_dry_run_tells_until_when_it_would_wait_and_does_not(run, log):
    run.transport = Short()
    far = {"value": "x", "due_at": NOW + 5 * HOUR}
    assert run.execute(**far, lead=MINUTE, deferrable=True, dry_run=True)["sent"] == 1
    assert (run.transport.sent, run.now) == ([], NOW)
    assert "would wait until 2026-03-01T16:59:00+00:00" in log.text


def test_far_ones_of_a_batch_wait_in_the_store_once_the_first_is_near(run):
    parameters = {
        "messages": [{"value": str(hours), "delay_seconds": hours * 3600} for hours in (3, 9)],
        "lead": MINUTE,
        "store_conn_id": "store",
    }
    deferred(run, **parameters)
    assert run.store.sent == []
    run.now += 3 * HOUR - MINUTE
    assert resumed(run, **parameters)["stored"] == 1


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
    run.execute(value="x", delay="PT5H10M", lead="PT1H", store_conn_id="store", hold_over="PT2H")
    assert run.now == NOW + 4 * HOUR + 10 * MINUTE
    # the hour that was left is within the hold-over
    assert [message.due_at for message in run.transport.sent] == [NOW + 5 * HOUR + 10 * MINUTE]
    with pytest.raises(AirflowFailException, match="were due more than 12:00:00 before"):
        run.execute(value="x", due_at=NOW - 13 * HOUR, max_past="PT12H")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"value": "x", "lead": 5}, "lead=5 must be a timedelta or an ISO 8601 duration such as 'PT10M'"),
        ({"value": "x", "lead": -MINUTE}, "not negative"),
        ({"value": "x", "lead": "P1M"}, "'P1M' has months or years"),
        ({"value": "x", "hold_over": "10"}, "hold_over='10' must be a timedelta"),
        ({"value": "x", "on_clear": "never"}, "on_clear='never' is none of 'same_ids', 'new_ids'"),
        ({"value": "x", "on_clear": "new_ids", "message_id": "m"}, "has no power over ids"),
        ({"messages": [], "on_clear": "new_ids", "id_columns": ["a"]}, "has no power over ids"),
    ],
)
def test_contradiction_is_an_error_when_the_dag_is_parsed(run, arguments, says):
    with pytest.raises(ValueError, match=says):
        run.task(**arguments)
