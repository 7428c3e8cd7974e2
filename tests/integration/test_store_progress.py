"""How far messages have come: each counts once by its outcome, wherever it is, on every database."""

from __future__ import annotations

from contextlib import closing
from datetime import datetime, timedelta, timezone

import pytest
from support.stores import Store, Transport, message

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.identity import Origin, SentBy
from airflow_delayed.store.dispatch.report import DispatchFailed

PAST = datetime(2020, 1, 1, tzinfo=timezone.utc)
LATER = datetime(2030, 5, 6, 7, 8, 9, tzinfo=timezone.utc)
HOUR = timedelta(hours=1)
MONDAY = Origin(dag_id="billing", run_id="monday", task_id="remind")
ALL = SentBy(dag_id="billing", run_id="monday")


def outcomes(hook: DelayedStoreHook, **wanted) -> dict[str, int]:
    found = hook.progress(**wanted)
    assert sum(found.outcomes.values()) == found.total
    return {name: number for name, number in found.outcomes.items() if number}


def test_each_message_counts_once_by_its_outcome(store: Store):
    store.installed()
    hook = store.hook(origin=MONDAY)
    now = hook.now()
    hook.send(
        [
            message("sent", PAST, tag="ann"),
            message("fails", PAST, destination="gone", tag="ann"),
            message("late", now - HOUR, expires_at=now - HOUR / 2),
            message("off", LATER, tag="ann"),
            message("waits", LATER, tag="ann"),
            message("waits-too", LATER + HOUR, destination="r"),
        ]
    )
    hook.note_sent([message("at-once", PAST, tag="ann")])
    store.hook().send([message("of-others", LATER, tag="ann")])
    assert outcomes(hook, sent_by=ALL) == {"waiting": 5, "expired": 1, "dispatched": 1}
    with pytest.raises(DispatchFailed):
        store.dispatcher(hook, Transport(missing={"gone"}), number_of_retries=0).run()
    hook.cancel(["off"])
    done = {"dispatched": 2, "cancelled": 1, "failed": 1, "expired": 1}
    found = hook.progress(sent_by=ALL)
    assert outcomes(hook, sent_by=ALL) == {"waiting": 2, **done}
    assert (found.total, found.given_up, found.next_due) == (7, 2, LATER)
    assert outcomes(hook, tag="ann") == {"waiting": 2, "dispatched": 2, "cancelled": 1, "failed": 1}
    assert outcomes(hook, destination="r") == {"waiting": 1}
    assert outcomes(hook, deliver_conn_id="broker", due_until=LATER) == {"dispatched": 2, "failed": 1, "expired": 1}
    assert outcomes(hook, ids=["sent", "waits", "waits", "unknown"]) == {"waiting": 1, "dispatched": 1}
    # more ids than one statement takes
    assert outcomes(hook, ids=["off", *(f"unknown-{number}" for number in range(3000))]) == {"cancelled": 1}
    assert outcomes(hook, sent_by=SentBy(dag_id="billing", task_id="other")) == {}
    # what waits no longer is due no longer
    hook.cancel(["waits", "waits-too"])
    assert hook.progress(sent_by=ALL).next_due is None
    hook.purge(timedelta(0), reason=["failed"])
    hook.erase(["sent"])
    assert outcomes(hook, sent_by=ALL) == {"dispatched": 1, "cancelled": 3, "expired": 1, "purged": 1}
    assert outcomes(hook, ids=["sent", "fails"]) == {"purged": 1, "erased": 1}


def test_what_is_in_flight_waits(store: Store):
    hook = store.installed()
    hook.send([message("m", PAST), message("off", LATER)])
    seen = []

    class Looking(Transport):
        def send(self, messages):
            with closing(store.hook()) as other:
                seen.append(outcomes(other, destination="q"))
            return super().send(messages)

    store.dispatcher(hook, Looking()).run()
    assert seen == [{"waiting": 2}]
    assert outcomes(hook, destination="q") == {"waiting": 1, "dispatched": 1}


@pytest.mark.parametrize("own", [True, False], ids=["a queue table", "a broker"])
def test_what_went_to_the_error_destination_is_given_up(store: Store, own: bool):
    hook = store.installed("q", "errors", deliver_conn_id=None) if own else store.installed()
    hook.send([message("good", PAST, destination="q"), message("bad", PAST, destination="gone")])
    transport = None if own else Transport(missing={"gone"})
    report = store.dispatcher(hook, transport, number_of_retries=0, error_destination="errors").run()
    assert (report.dispatched, report.error_destination) == (1, 1)
    assert outcomes(hook, ids=["good", "bad"]) == {"dispatched": 1, "dead_lettered": 1}
    assert hook.progress(ids=["good", "bad"]).given_up == 1
    # elsewhere it is dispatched, as ever
    assert {one.message_id for one in hook.page(state="dispatched").remembered} == {"good", "bad"}
    assert str(hook.cancel(["bad"])["bad"]) == str(hook.cancel(["good"])["good"])


def test_what_the_run_sent_at_once_is_found_by_run_and_connection(store: Store):
    store.installed()
    hook = store.hook(origin=MONDAY)
    hook.note_sent([message("at-once", PAST)])
    (sent,) = hook.page(state="dispatched", sent_by=ALL, deliver_conn_id="broker").remembered
    assert (sent.origin, sent.deliver_conn_id, sent.dispatcher) == (MONDAY, "broker", None)
    assert outcomes(hook, deliver_conn_id=hook.conn_id) == {}


def test_what_notifiers_store_about_a_run_is_not_its_own(store: Store):
    store.installed()
    hook = store.hook(origin=MONDAY)
    hook.send([message("escalation", LATER, tag="notifier:billing")])
    hook.send([message("mine", LATER, tag="notifiers"), message("untagged", LATER)])
    assert outcomes(hook, sent_by=ALL) == {"waiting": 2}
    assert outcomes(hook, sent_by=ALL, tag="notifier:billing") == {"waiting": 1}
    hook.cancel(tag="notifier:billing")
    assert outcomes(hook, sent_by=ALL) == {"waiting": 2}


def test_a_state_is_of_the_store_alone(store: Store):
    hook = store.installed()
    with pytest.raises(ValueError, match="state= and reason= are of messages in the store alone"):
        hook.progress(state="waiting")
