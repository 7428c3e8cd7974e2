"""Where a message came from, and that it was replaced: shown of what waits and of what has failed."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta, timezone

import pytest
from sqlalchemy import delete, select, update
from support.stores import Store, Transport, message, on_postgres_too

from airflow_delayed.identity import Origin, SentBy
from airflow_delayed.store.dispatch.report import DispatchFailed

LATER = datetime(2030, 5, 6, 7, 8, 9, 123456, tzinfo=timezone.utc)
MONDAY = Origin(dag_id="the dag's ☂", run_id="r" * 250, task_id="t" * 250, map_index=7)
TUESDAY = Origin(dag_id="the dag's ☂", run_id="R" * 250, task_id="t" * 250)


def noted(hook) -> dict[Origin, int]:
    table = hook.tables.runs
    with hook.engine.connect().execution_options(read_only=True) as connection:
        return {
            Origin(dag_id=row.DagId, run_id=row.RunId, task_id=row.TaskId, map_index=row.MapIndex): row.Seq
            for row in connection.execute(select(table))
        }


def fail(store: Store, hook) -> None:
    """Give up what is due for the destination "gone"."""
    with pytest.raises(DispatchFailed):
        store.dispatcher(hook, Transport(missing={"gone"})).run()


def test_a_message_tells_which_run_stored_it(store: Store):
    store.installed().send([message("nobody's", LATER)])
    for origin, names in ((MONDAY, ["a", "b"]), (TUESDAY, ["c"]), (MONDAY, ["b", "d"])):
        store.hook(origin=origin).send(message(name, LATER) for name in names)
    store.hook(origin=Origin(dag_id="d", run_id="r", task_id="t")).send([])
    hook = store.hook()
    assert {one.message_id: one.origin for one in hook.list()} == {
        **dict.fromkeys(("a", "b", "d"), MONDAY),
        "c": TUESDAY,
        "nobody's": None,
    }
    assert hook.get("c").origin == TUESDAY
    # who stores nothing is not noted
    assert noted(hook).keys() == {MONDAY, TUESDAY}


@on_postgres_too
def test_what_is_replaced_takes_the_new_origin_and_says_since_when(store: Store):
    first = store.installed()
    first.origin = MONDAY
    past = datetime.now(timezone.utc) - timedelta(minutes=1)
    first.send([message("same", LATER), message("waits", LATER), message("fails", past, destination="gone")])
    fail(store, first)
    before = {one.message_id: one for one in first.list()}
    assert before["fails"].state == "failed"
    assert {one.origin for one in before.values()} == {MONDAY}
    assert {one.replaced_at for one in before.values()} == {None}

    again = store.hook(on_conflict="replace", origin=TUESDAY)
    start = again.now()
    report = again.send(message(name, LATER, body=b"new" if name != "same" else b"body of same") for name in before)
    assert (report.replaced, report.duplicates) == (2, 1)
    after = {one.message_id: one for one in again.list()}
    assert after["same"] == before["same"]
    for name in ("waits", "fails"):
        one = after[name]
        assert (one.origin, one.state) == (TUESDAY, "waiting")
        assert one.stored_at == before[name].stored_at
        assert start <= one.replaced_at <= again.now()


def test_what_has_failed_and_waits_again_keeps_its_origin(store: Store):
    hook = store.installed()
    hook.origin = MONDAY
    hook.send([message("a", datetime.now(timezone.utc) - timedelta(minutes=1), destination="gone")])
    fail(store, hook)
    hook.retry(["a"])
    (one,) = hook.list()
    assert (one.state, one.origin) == ("due", MONDAY)


def test_several_store_for_one_run_at_once(store: Store):
    """As Spark's executors do."""
    store.installed()
    hooks = [store.hook(origin=MONDAY) for _ in range(6)]
    start = threading.Barrier(len(hooks))
    errors = []

    def work(number: int) -> None:
        start.wait()
        try:
            hooks[number].send([message(f"m{number}", LATER)])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(hooks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert [one.origin for one in hooks[0].list()] == [MONDAY] * len(hooks)
    assert len(noted(hooks[0])) == 1


def test_runs_of_which_nothing_is_left_are_forgotten_with_their_ids(store: Store, monkeypatch: pytest.MonkeyPatch):
    hook = store.installed()
    used, unused, young, again = (Origin(dag_id="d", run_id=f"r{n}", task_id="t") for n in range(4))
    for origin in (used, unused, young, again):
        hook.origin = origin
        hook.send([message(origin.run_id, LATER)])
    # the run of what can be restored is still needed
    hook.cancel([used.run_id])
    monkeypatch.setenv("AIRFLOW__DELAYED__CANCEL_GRACE", "0")
    hook.cancel([unused.run_id, young.run_id, again.run_id])
    old, table = hook.now() - timedelta(days=15), hook.tables.runs
    aged = [noted(hook)[origin] for origin in (used, unused, again)]
    with hook.engine.begin() as connection:
        connection.execute(update(table).where(table.c.Seq.in_(aged)).values(At=old))
    # it begins to store again: its number stays
    number = noted(hook)[again]
    hook.origin = again
    hook.send([message("more", LATER)])
    hook.cancel(["more"])
    assert noted(hook)[again] == number
    store.dispatcher(hook, Transport(), remember=timedelta(days=20)).run()
    assert noted(hook).keys() == {used, unused, young, again}
    past = hook.tables.past
    with hook.engine.begin() as connection:
        connection.execute(delete(past).where(past.c.Id == unused.run_id))
    store.dispatcher(hook, Transport()).run()
    assert noted(hook).keys() == {used, young, again}
    assert hook.restore([used.run_id]).changed == 1
    assert hook.get(used.run_id).origin == used


def test_iterations_of_a_task_loop_are_told_apart(store: Store):
    store.installed()
    first, second = (Origin(dag_id="d", run_id="r", task_id="t", iteration=number) for number in (1, 2))
    for name, origin in (("a", first), ("b", second)):
        store.hook(origin=origin).send([message(name, LATER)])
    hook = store.hook()
    assert {one.message_id: one.origin for one in hook.list()} == {"a": first, "b": second}
    # a filter by the task finds those of all iterations
    assert [one.message_id for one in hook.list(sent_by=SentBy(dag_id="d", task_id="t"))] == ["a", "b"]
