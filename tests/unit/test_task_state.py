"""What a send keeps in Airflow's task state, and what it does where a clear, a kill or an old Airflow has lost it."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
from airflow.sdk.exceptions import AirflowFailException
from support.send_runs import NOW, Run, States, rows

from airflow_delayed import compat
from airflow_delayed.errors import SendFailed

HOUR = timedelta(hours=1)


def due_times(run):
    return {message.message_id: message.due_at for message in run.transport.sent}


@pytest.fixture
def forgetful_clear(run, monkeypatch):
    """Clear the task as Airflow 3.4 does: its state is deleted."""
    monkeypatch.setattr(compat, "CLEAR_DELETES_STATE", True)

    def clear():
        run.clear()
        run.states = States()

    return clear


def test_a_worker_that_is_lost_after_all_was_sent_sends_nothing_when_it_is_tried_again(run):
    first = run.execute(messages=rows(7))
    # Airflow does not know of the success: the try was lost, and is followed by another one
    run.now += timedelta(hours=5)
    again = run.execute(messages=rows(7))
    assert len(run.transport.sent) == 7
    assert (again["sent"], again["earlier_tries"]) == (first["sent"], 7)


def test_the_same_try_again_is_a_person_who_wants_it_sent(run):
    run.execute(messages=rows(3))
    run.try_number -= 1
    run.execute(messages=rows(3))
    assert (len(run.ids()), len(set(run.ids()))) == (6, 3)


def test_the_first_try_says_what_delays_count_from(run, caplog):
    with caplog.at_level("INFO", logger="airflow_delayed"):
        run.execute(messages=rows(1))
    assert f"relative delays count from {NOW.isoformat()}" in caplog.text
    assert run.xcoms == {"delays_count_from": NOW.isoformat()}


@pytest.mark.parametrize("failed_half_way", [True, False], ids=["failed half-way", "succeeded"])
def test_a_clear_that_forgets_sends_no_relative_delay_again(run, forgetful_clear, failed_half_way):
    if failed_half_way:
        run.transport.fail_after = 2
        with pytest.raises(SendFailed):
            run.execute(messages=rows(3))
        run.transport.fail_after = None
    else:
        run.execute(messages=rows(3))
    before = due_times(run)
    forgetful_clear()
    run.now += HOUR
    with pytest.raises(AirflowFailException, match=r"keep_task_state.*delay_from="):
        run.execute(messages=rows(3))
    assert due_times(run) == before

    # with the anchor that the first try logged the messages are the same
    run.execute(messages=rows(3), delay_from=run.xcoms["delays_count_from"])
    assert before.items() <= due_times(run).items()
    assert len(due_times(run)) == 3


def test_new_ids_count_from_the_clear(run, forgetful_clear):
    run.execute(messages=rows(3), on_clear="new_ids")
    before = due_times(run)
    run.transport.sent.clear()
    forgetful_clear()
    run.now += HOUR
    run.execute(messages=rows(3), on_clear="new_ids")
    assert not before.keys() & due_times(run).keys()
    assert min(due_times(run).values()) == run.now + timedelta(seconds=60)


def test_absolute_times_keep_their_ids_over_a_clear_that_forgets(run, forgetful_clear):
    due = [{"value": "x", "due_at": NOW + timedelta(minutes=50)}]
    run.execute(messages=due)
    forgetful_clear()
    run.execute(messages=due)
    assert (len(run.ids()), len(set(run.ids()))) == (2, 1)


def test_a_clear_that_forgets_skips_no_row_that_fell_due_meanwhile(run, forgetful_clear):
    due = [{"value": str(hours), "due_at": NOW + hours * HOUR} for hours in (1, 9)]
    run.transport.fail_after = 0
    with pytest.raises(SendFailed):
        run.execute(messages=due, past_due="skip")
    run.transport.fail_after = None
    forgetful_clear()
    run.now += 4 * HOUR
    with pytest.raises(AirflowFailException, match="1 rows were due more than 1:00:00 before this try"):
        run.execute(messages=due, past_due="skip")
    assert run.ids() == []
    assert run.execute(messages=due, past_due="send")["sent"] == 2


def test_a_retry_of_a_worker_that_was_lost_before_it_began_goes_on(run, forgetful_clear, caplog):
    """As is one that was cleared while it ran, which Airflow does not tell apart."""
    run.try_number, run.max_tries = 1, 1
    with caplog.at_level("WARNING", logger="airflow_delayed"):
        assert run.execute(messages=rows(2), retries=1)["sent"] == 2
    assert "try 2 finds nothing of an earlier one" in caplog.text


def test_a_state_that_airflow_does_not_take_fails_the_try_before_anything_is_sent(run, forgetful_clear, monkeypatch):
    run.max_tries = 1

    def refuse(key, value, retention=None):
        raise ConnectionError("the API server is away")

    with monkeypatch.context() as away:
        away.setattr(run.states, "set", refuse, raising=False)
        with pytest.raises(ConnectionError):
            run.execute(messages=rows(2), retries=1)
    assert run.ids() == []
    assert run.execute(messages=rows(2), retries=1)["sent"] == 2


@pytest.mark.parametrize("retries", [0, 3], ids=["fewer", "more"])
def test_a_clear_is_seen_also_where_the_dag_has_other_retries_now(run, forgetful_clear, retries):
    run.max_tries = 2
    run.execute(messages=rows(2), retries=2)
    # as Airflow counts: the tries that there were, and the retries that there are
    run.states, run.max_tries = States(), 1 + retries
    with pytest.raises(AirflowFailException, match="delay_from="):
        run.execute(messages=rows(2), retries=retries)


def test_airflow_that_keeps_no_state_refuses_relative_delays_in_a_later_try(run, monkeypatch):
    monkeypatch.setattr(Run, "context", property(lambda self: {"ti": fresh_ti(self)}))

    def fresh_ti(self):
        names = {"dag_id": "dag", "run_id": "run-1", "task_id": "send", "map_index": -1}
        return SimpleNamespace(
            **names,
            max_tries=1,
            try_number=self.try_number,
            xcom_push=lambda key, value: self.xcoms.update({key: value}),
        )

    run.execute(messages=rows(1), retries=1)
    assert run.xcoms == {"delays_count_from": NOW.isoformat()}
    with pytest.raises(AirflowFailException, match=r"Airflow before 3\.3 does not keep it"):
        run.execute(messages=rows(1), retries=1)
    run.execute(messages=rows(1), retries=1, delay_from=NOW)


def test_a_try_beyond_all_retries_was_cleared_whatever_the_dag_says_now(run, forgetful_clear):
    run.try_number = 3
    with pytest.raises(AirflowFailException, match="delay_from="):
        run.execute(messages=rows(1), retries=2)


def test_a_dry_run_that_is_cleared_sends_where_a_clear_forgets_nothing(run):
    run.execute(messages=rows(2), dry_run=True)
    run.clear()
    run.now += HOUR
    run.execute(messages=rows(2))
    assert min(due_times(run).values()) == run.now + timedelta(seconds=60)


def test_a_dry_run_that_is_cleared_may_have_sent_where_a_clear_forgets(run, forgetful_clear):
    run.execute(messages=rows(2), dry_run=True)
    forgetful_clear()
    with pytest.raises(AirflowFailException, match="delay_from="):
        run.execute(messages=rows(2))


def test_state_that_is_deleted_on_success_is_missed_by_a_clear(run, monkeypatch):
    monkeypatch.setenv("AIRFLOW__STATE_STORE__CLEAR_ON_SUCCESS", "True")
    run.execute(messages=rows(2))
    run.clear()
    run.states = States()
    with pytest.raises(AirflowFailException, match="delay_from="):
        run.execute(messages=rows(2))


@pytest.mark.parametrize("delay_from", ["run", "2026-02-28T12:00:00Z", "{began}"])
def test_delays_count_from_the_run_or_a_time(run, delay_from, monkeypatch):
    began = NOW - timedelta(days=1)
    context = {**run.context, "dag_run": SimpleNamespace(run_after=began)}
    monkeypatch.setattr(Run, "context", context)
    run.execute(messages=[{"value": "x", "delay_seconds": 100_000}], delay_from=delay_from.format(began=began))
    [due] = due_times(run).values()
    assert due == began + timedelta(seconds=100_000)


def test_delay_from_needs_a_time(run):
    with pytest.raises(AirflowFailException, match="delay_from"):
        run.execute(messages=rows(1), delay_from="yesterday")
    with pytest.raises(AirflowFailException, match=r"delay_from: .* has no time zone"):
        run.execute(messages=rows(1), delay_from="2026-01-30T12:00:00")


def test_past_due_rows_say_what_they_count_from(run):
    with pytest.raises(AirflowFailException, match="first try began, at 2026-03-01 12:00:00 UTC"):
        run.execute(messages=[{"value": "x", "due_at": NOW - 2 * HOUR}])


def test_a_task_that_is_ended_sends_nothing_more(run):
    operator = run.task(messages=rows(5000))
    send = run.transport.send

    def ended(messages):
        operator.on_kill()
        return send(messages)

    run.transport.send = ended
    with pytest.raises(Exception, match=r"sending stopped after [0-9,]+ messages .* the task was ended"):
        operator.execute(run.context)
    assert len(run.ids()) <= 2500
