"""What `verify` says of messages that are not dispatched in time."""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy import select
from support.rabbitmq import eventually
from support.sleeping import Time
from support.standing import give_up, mark_dispatched
from support.stores import Store, Transport, message

from airflow_delayed.delivery import Finding
from airflow_delayed.message import DelayedMessage

SECOND = timedelta(seconds=1)


def send(hook, message_id, late):
    hook.send([DelayedMessage(destination="q", body=b"x", due_at=hook.now() - late, message_id=message_id)])


def found(hook) -> dict[str | None, Finding]:
    report = hook.verify([])
    assert {finding.severity for finding in report if finding.code} == {f.severity for f in hook.health()}
    return {finding.code: finding for finding in hook.health()}


def set_heartbeat(store: Store, hook, seconds: int, *, ended: bool) -> None:
    """Move the sign of life of every dispatcher into the past, as if it had been killed then, or had ended.

    Time stands still from here on: a dispatcher is missed after 9 s, which a slow test may take.
    """
    Time(hook)
    table, moment = hook.tables.dispatchers, hook.now() - timedelta(seconds=seconds)
    with hook.engine.begin() as connection:
        connection.execute(table.update().values(SeenAt=moment, EndedAt=moment if ended else None))


def test_nothing_is_said_of_a_store_that_is_well(store: Store):
    hook = store.installed()
    store.dispatcher(hook, Transport()).run()
    send(hook, "later", -timedelta(hours=1))
    send(hook, "just-due", SECOND)
    assert hook.health() == []
    assert hook.verify([]).ok


def test_messages_wait_and_no_dispatcher_was_there(store: Store):
    hook = store.installed()
    assert hook.health() == []
    send(hook, "later", -timedelta(hours=1))
    assert found(hook)["no-dispatcher"].severity == "warning"
    assert hook.verify([]).ok


def test_no_dispatcher_within_a_day(store: Store):
    hook = store.installed()
    send(hook, "late", 61 * SECOND)
    finding = found(hook)["no-dispatcher"]
    assert finding.severity == "error"
    assert "1 overdue" in finding.what
    assert "no dispatcher was at work for it within a day" in finding.what
    assert "'broker' in its deliver_conn_ids" in str(finding.remedy)
    assert not hook.verify([]).ok


@pytest.mark.parametrize(
    "silent, ended, late, code",
    [
        (10, False, 11, "no-dispatcher"),  # killed
        # five seconds ahead: as at work as can be, for a slow machine needs some to look
        (-5, False, 1, None),  # at work, and it is not long ago
        (-5, False, 11, "overdue"),
        (30, True, 40, None),  # a pass each minute
        (70, True, 61, "no-dispatcher"),
    ],
)
def test_a_dispatcher_that_is_silent_has_ended_or_is_at_work(store: Store, silent, ended, late, code):
    hook = store.installed()
    store.dispatcher(hook, Transport()).run()
    send(hook, "late", late * SECOND)
    set_heartbeat(store, hook, silent, ended=ended)
    assert list(found(hook)) == ([code] if code else [])


@pytest.mark.parametrize("dag_id, code", [("dispatch", None), (None, "no-dispatcher")])
def test_a_run_of_a_dag_comes_again_and_a_service_does_not(store: Store, dag_id: str | None, code: str | None):
    """Both began three times within four hours, and ended in good order some minutes ago."""
    hook = store.installed()
    for _ in range(3):
        store.dispatcher(hook, Transport()).run()
    ended = hook.now() - timedelta(minutes=5)
    table = hook.tables.dispatchers
    with hook.engine.begin() as connection:
        ids = connection.execute(select(table.c.Id)).scalars().all()
        for hours, name in enumerate(ids):
            began = ended - timedelta(hours=2 * hours, minutes=1)
            values = {"StartedAt": began, "SeenAt": ended, "EndedAt": ended, "DagId": dag_id}
            connection.execute(table.update().where(table.c.Id == name).values(**values))
    send(hook, "late", 120 * SECOND)
    assert list(found(hook)) == ([code] if code else [])


def test_a_dispatcher_at_work_that_does_not_list_the_connection(store: Store):
    hook = store.installed()
    store.dispatcher(hook, Transport(), deliver_conn_ids=["another"]).run()
    set_heartbeat(store, hook, -5, ended=False)
    send(hook, "late", 61 * SECOND)
    assert "the dispatchers at work deliver through another alone" in found(hook)["no-dispatcher"].what


def test_the_last_dispatchers_did_not_list_the_connection(store: Store):
    hook = store.installed()
    store.dispatcher(hook, Transport(), deliver_conn_ids=["rabbit_old"]).run()
    set_heartbeat(store, hook, 240, ended=True)
    send(hook, "late", 61 * SECOND)
    what = found(hook)["no-dispatcher"].what
    assert "no dispatcher was at work for it within a day; the last dispatchers delivered through rabbit_old" in what


def test_messages_that_a_dispatcher_holds_or_tries_again_later_are_overdue_too(store: Store):
    hook = store.installed()
    store.dispatcher(hook, Transport()).run()
    set_heartbeat(store, hook, -5, ended=False)
    for message_id in ("held", "later"):
        send(hook, message_id, 90 * SECOND)
    now = hook.now()
    messages, past = hook.tables.messages, hook.tables.past
    with hook.engine.begin() as connection:
        connection.execute(messages.update().where(messages.c.Id == "later").values(NextTry=now + 60 * SECOND))
        connection.execute(past.insert().values(Id="held", Outcome="leased", At=now, ClaimedUntil=now + 60 * SECOND))
    finding = found(hook)["overdue"]
    assert finding.what.startswith("2 overdue, the oldest since ")
    assert finding.what.endswith("for q, although a dispatcher is at work for it; 1 were tried in vain")
    assert finding.since == min(one.due_at for one in hook.list())
    assert hook.counts().overdue == 2
    (late,) = hook.condition().lateness
    assert (late.conn_id, late.destination, late.overdue, late.late_seconds >= 90) == ("broker", "q", 2, True)


def test_a_destination_of_which_all_messages_fail_is_named_with_the_reason(
    store: Store, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("airflow_delayed.store.dispatch.dispatcher.HEARTBEAT", 0.05)
    hook, transport = store.installed(), Transport(refused={"a1", "a2", "b1"})
    late = hook.now() - 11 * SECOND
    hook.send(message(name, late, destination=name[0]) for name in ("a1", "a2", "b1", "b2"))
    made = store.dispatcher(hook, transport)
    made.once()
    eventually(lambda: "destination-refuses" in found(hook))
    (finding,) = (one for one in hook.health() if one.code == "destination-refuses")
    # of b one was delivered
    assert finding.destination == "a"
    assert finding.what.startswith("all its messages fail since ")
    assert "refused" in finding.what
    assert "2 overdue" in str(finding.why)
    assert f"airflow delayed retry --store-conn-id {hook.conn_id} --destination a" in str(finding.remedy)
    # a delivered message takes it back
    transport.refused.clear()
    hook.send([message("a3", late, destination="a")])
    eventually(lambda: made.once() and "destination-refuses" not in found(hook))


def test_failed_messages_are_named(store: Store):
    hook = store.installed()
    send(hook, "bad", SECOND)
    with hook.engine.begin() as connection:
        messages, failed = hook.tables.messages, hook.tables.failed
        row = dict(connection.execute(messages.select()).mappings().one())
        connection.execute(failed.insert().values(**row, Reason="failed", FailedAt=hook.now()))
        connection.execute(messages.delete())
    finding = found(hook)["failed"]
    assert finding.severity == "warning"
    assert finding.what == "1 were given up and are not tried again"
    assert "--state failed" in str(finding.remedy)
    assert f"airflow delayed retry --store-conn-id {hook.conn_id} --destination q; then a dispatcher" in str(
        finding.remedy
    )


def test_the_destinations_of_what_waits_or_has_failed(store: Store):
    hook = store.installed()
    assert hook.destinations() == {}
    soon = hook.now() + timedelta(hours=1)
    hook.send(message(f"m{n}", soon, destination=f"q{n % 2}") for n in range(4))
    hook.send([message("bad", soon, destination="gone"), message("done", hook.now(), destination="past")])
    store.hook(None).send([message("own", soon, destination="table")])
    give_up(hook, "bad")
    mark_dispatched(hook, "done")
    assert hook.destinations() == {"broker": ["gone", "q0", "q1"], hook.conn_id: ["table"]}
