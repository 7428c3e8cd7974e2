"""The same id again: everything that can have become of it, with each on_conflict, on every database."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from typing import TypeVar

import pytest
from sqlalchemy import insert, select, update
from sqlalchemy.exc import IntegrityError, OperationalError
from support.standing import hold, lock, record, settle
from support.stores import Store, message

from airflow_delayed.errors import MessageConflict, TransportUnavailable
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.message import DelayedMessage
from airflow_delayed.store.api import DISPATCHED
from airflow_delayed.store.records import count_rows, remove_rows

pytestmark = pytest.mark.mariadb

LATER = datetime(2030, 5, 6, 7, 8, 9, 123456, tzinfo=timezone.utc)
MINUTE = timedelta(minutes=1)
T = TypeVar("T")
#: What can have become of an id.
FATES = ["new", "waiting", "tried", "leased", "dead", "failed", "dispatched", "cancelled"]


def first(fate: str) -> DelayedMessage:
    return message(f"{fate.replace(' ', '-')}", LATER, tag="old", headers={"x": "1"}, expires_at=LATER + MINUTE)


def second(fate: str) -> DelayedMessage:
    return message(
        f"{fate.replace(' ', '-')}", LATER - MINUTE, body=b"hush", destination="r", headers={"secret": "hush"}
    )


def prepare(hook: DelayedStoreHook) -> None:
    """Store the first message of each fate, and let it come to that."""
    hook.send(first(fate) for fate in FATES if fate != "new")
    now, tables = hook.now(), hook.tables
    with hook.engine.begin() as connection:
        tries = {"RetryCount": 3, "NextTry": LATER, "LastError": "refused"}
        connection.execute(update(tables.messages).where(tables.messages.c.Id == "tried").values(tries))
        for fate, outcome, until in (
            ("leased", DISPATCHED, now + timedelta(hours=1)),
            ("dead", DISPATCHED, now - MINUTE),
            ("dispatched", DISPATCHED, None),
            ("cancelled", "cancelled", None),
        ):
            record(connection, hook.tables, lock(connection, hook.tables, fate), outcome, now, ClaimedUntil=until)
        row = connection.execute(select(tables.messages).where(tables.messages.c.Id == "failed")).one()
        gone = {**row._mapping, "RetryCount": 3, "Reason": "failed", "FailedAt": now}
        connection.execute(insert(tables.failed), [gone])
        remove_rows(connection, tables.messages, ["failed", "dispatched", "cancelled"])


def content(hook: DelayedStoreHook) -> Mapping[str, tuple]:
    with hook.engine.connect() as connection:
        rows = connection.execute(select(hook.tables.messages)).mappings().all()
    return {
        row["Id"]: (
            *(
                row["Destination"],
                bytes(row["State"]),
                row["Time"],
                bytes(row["Headers"]),
                row["Tag"],
                row["ExpiresAt"],
            ),
            *(row["DeliverConnId"], row["RetryCount"], row["NextTry"], row["LastError"]),
        )
        for row in rows
    }


def of(one: DelayedMessage, conn_id: str = "broker") -> tuple:
    headers = b'{"secret":"hush"}' if "secret" in one.headers else b'{"x":"1"}'
    return (one.destination, one.body, one.due_at, headers, one.tag, one.expires_at, conn_id, 0, None, None)


@pytest.mark.parametrize("on_conflict", ["error", "keep", "replace"])
def test_the_same_content_is_a_duplicate_whatever_became_of_it(store: Store, on_conflict):
    prepare(store.installed())
    hook = store.hook(on_conflict=on_conflict)
    before = content(hook)
    assert hook.conflicting({"leased": b"x"}) == (["leased"] if on_conflict == "error" else [])
    report = hook.send(first(fate) for fate in FATES)
    assert (report.sent, report.duplicates, report.replaced, report.not_replaced) == (1, 7, 0, 0)
    assert content(hook) == {**before, "new": of(first("new"))}


def test_other_content_is_an_error_but_for_what_was_cancelled(store: Store):
    prepare(store.installed())
    hook = store.hook()
    before = content(hook)
    for fate in FATES:
        one = second(fate)
        if fate in ("new", "cancelled"):
            assert hook.conflicting({one.message_id: b"other"}) == []
            continue
        assert hook.conflicting({one.message_id: b"other"}) == [one.message_id]
        with pytest.raises(MessageConflict, match=f": {one.message_id}\\. .* pass on_conflict='keep'") as caught:
            hook.send([message("bystander", LATER), one])
        assert "hush" not in str(caught.value)
    assert content(hook) == before
    report = hook.send([second("cancelled")])
    assert (report.sent, report.duplicates, content(hook)) == (0, 1, before)


def test_keep_leaves_the_old_one(store: Store):
    prepare(store.installed())
    hook = store.hook("another", on_conflict="keep")
    before = content(hook)
    report = hook.send(second(fate) for fate in FATES)
    assert (report.sent, report.duplicates, report.replaced, report.not_replaced) == (1, 7, 0, 0)
    assert content(hook) == {**before, "new": of(second("new"), "another")}


def test_replace_changes_all_that_a_message_says_unless_it_is_too_late(store: Store, caplog):
    prepare(store.installed())
    hook = store.hook("another", on_conflict="replace")
    before = content(hook)
    report = hook.send([*(second(fate) for fate in FATES), second("waiting")])
    assert (report.sent, report.replaced, report.not_replaced, report.duplicates) == (1, 4, 3, 1)
    assert report.by_destination == {"r": 5}
    changed = ("new", "waiting", "tried", "dead", "failed")
    assert content(hook) == {**{fate: of(second(fate), "another") for fate in changed}, "leased": before["leased"]}
    with hook.engine.connect() as connection:
        assert count_rows(connection, hook.tables.failed) == 0
    # the dead dispatcher, should it live after all, holds it no longer
    assert set(store.past(hook)) & set(before) == {"leased"}
    assert "3 messages were not replaced" in caplog.text
    assert "the first are leased, dispatched, cancelled" in caplog.text
    assert "hush" not in caplog.text
    # once more: those are duplicates now
    report = hook.send(second(fate) for fate in changed)
    assert (report.duplicates, report.replaced) == (5, 0)


def test_another_connection_alone_is_other_content(store: Store):
    hook = store.installed()
    hook.send([first("waiting")])
    with pytest.raises(MessageConflict):
        store.hook("another").send([first("waiting")])
    assert store.hook("another", on_conflict="keep").send([first("waiting")]).duplicates == 1
    assert next(hook.list()).deliver_conn_id == "broker"
    assert store.hook("another", on_conflict="replace").send([first("waiting")]).replaced == 1
    assert next(hook.list()).deliver_conn_id == "another"


@pytest.mark.parametrize("on_conflict", ["error", "keep", "replace"])
def test_two_in_one_batch_are_an_error(store: Store, on_conflict):
    store.installed()
    hook = store.hook(on_conflict=on_conflict)
    with pytest.raises(MessageConflict, match="given twice with different content: waiting"):
        hook.send([first("waiting"), second("waiting")])
    assert hook.count() == 0


@pytest.mark.parametrize("store", ["postgres", "mariadb"], indirect=True)
def test_who_does_not_get_a_row_in_time_says_so_and_changes_nothing(store: Store, monkeypatch):
    store.installed().send([first("waiting"), first("leased")])
    hook, other = store.hook(on_conflict="replace"), store.hook()
    with other.engine.begin() as connection:
        assert len(lock(connection, other.tables, "leased")) == 1
        with monkeypatch.context() as patched:
            patched.setattr("airflow_delayed.store.engine.CONFLICT_WAIT", 0)
            with pytest.raises(TransportUnavailable, match=r"(?i)lock.* timeout"):
                hook.send([second("waiting"), second("leased"), first("new")])
        # who changes nothing is done all the same
        assert store.hook().send([first("leased")]).duplicates == 1
        assert content(hook) == {"waiting": of(first("waiting")), "leased": of(first("leased"))}
    assert hook.send([second("waiting"), second("leased"), first("new")]).replaced == 2


def test_many_replace_the_same_at_once(store: Store):
    """What is left of each is what one of them said, whole; and their counts add up."""
    store.installed()
    names = [f"m{number}" for number in range(300)]
    reports = []

    def send(number: int) -> None:
        due, body = LATER + number * MINUTE, str(number).encode()
        hook = store.hook(on_conflict="replace")
        reports.extend(hook.send(message(name, due, body=body) for name in names) for _ in range(2))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(reports) == 6
    assert sum(report.sent for report in reports) == len(names)
    counts = [report.sent + report.replaced + report.not_replaced + report.duplicates for report in reports]
    assert counts == [len(names)] * 6
    hook = store.hook()
    assert sorted(one.message_id for one in hook.list()) == sorted(names)
    assert all(row[1] == str((row[2] - LATER) // MINUTE).encode() for row in content(hook).values())


def patiently(work: Callable[[], T]) -> T:
    """Do it again where another transaction is in the way."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return work()
        except (OperationalError, IntegrityError):
            assert time.monotonic() < deadline


def test_nothing_goes_twice_while_it_is_replaced_and_dispatched(store: Store):
    """The nightly job runs over and over while a dispatcher runs: each message goes once, and none is lost."""
    names = [f"m{number:03}" for number in range(120)]
    store.installed().send(message(name, LATER) for name in names)
    handed: list[tuple[str, bytes]] = []
    reports, errors = [], []

    def dispatch() -> None:
        hook = store.hook()
        messages = hook.tables.messages
        for start in range(0, len(names), 8):
            wanted = names[start : start + 8]
            while wanted:
                taken = patiently(lambda wanted=wanted: hold(hook, *wanted))
                with hook.engine.connect() as connection:
                    rows = connection.execute(select(messages).where(messages.c.Id.in_(taken))).mappings().all()
                handed.extend((row["Id"], bytes(row["State"])) for row in rows)
                patiently(lambda taken=taken: settle(hook, *taken))
                wanted = [name for name in wanted if name not in taken]

    def run(work) -> None:
        try:
            work()
        except Exception as error:
            errors.append(error)

    dispatcher = threading.Thread(target=run, args=(dispatch,))
    dispatcher.start()
    hook, round_ = store.hook(on_conflict="replace"), 0
    while True:
        last = not dispatcher.is_alive()
        round_ += 1
        reports.append(hook.send(message(name, LATER, body=str(round_).encode()) for name in names))
        if last:
            break
    dispatcher.join(60)
    assert errors == []
    assert sorted(name for name, _ in handed) == names
    assert hook.count() == 0
    assert sum(report.sent for report in reports) == 0
    assert all(report.replaced + report.not_replaced + report.duplicates == len(names) for report in reports)
    # what went says in which round it was put in place last: nothing went as it was before a change that was reported
    rounds = [int(body) if body.isdigit() else 0 for _, body in handed]
    assert sum(report.replaced for report in reports) <= sum(rounds)
    assert reports[-1].not_replaced == len(names)
