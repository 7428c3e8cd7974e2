"""What a store remembers of successes: no message to anybody who lists, counts, searches or changes messages."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import select
from support.etl import Etl
from support.stores import Transport, message, on_postgres_too

from airflow_delayed.message import InvalidMessage, check_id
from airflow_delayed.store.api import Outcome


def marks(etl: Etl) -> list[str]:
    past = etl.hook.tables.past
    with etl.hook.engine.connect() as connection:
        return list(connection.execute(select(past.c.Id).where(past.c.Outcome == "mark").order_by(past.c.Id)).scalars())


@on_postgres_too
def test_a_success_is_remembered_and_shown_nowhere(etl: Etl) -> None:
    etl.green("1", 0)
    etl.red("2", 1)
    etl.red("3", 2)
    etl.green("4", 3)
    found, hook = marks(etl), etl.hook
    # one for each run, one for all of them, one for the failure that joined
    assert len(found) == 6
    for name in found:
        try:
            check_id(name)
        except InvalidMessage:
            continue
        raise AssertionError(f"a message could have the id {name!r}")
    # the message that was taken back is remembered
    (cancelled,) = hook.page(state="cancelled").remembered
    assert [one.value for one in hook.search("") if one.field == "id"] == [cancelled.message_id]
    assert hook.search(found[0]) == []
    assert [hook.get(name) for name in found] == [None] * 6
    assert hook.page(ids=found).remembered == []
    assert list(hook.list()) == []
    assert hook.known([*found, cancelled.message_id]) == {cancelled.message_id}
    assert (hook.counts().remembered, hook.counts(destination="desk").remembered) == (1, 1)
    assert hook.last_dispatched() is None
    for change in (hook.cancel, hook.restore, hook.erase, hook.retry):
        assert set(change(found).values()) == {Outcome.ABSENT}
    assert hook.purge(timedelta(0), reason="remembered", dry_run=True).counts == {"forgotten": 1}
    assert marks(etl) == found
    # whoever forgets the ids forgets what has succeeded as well
    assert hook.purge(timedelta(0), reason="remembered").counts == {"forgotten": 1}
    assert (marks(etl), hook.counts().remembered) == ([], 0)


@on_postgres_too
def test_successes_are_forgotten_as_ids_are(etl: Etl) -> None:
    etl.hook.send([message("m", etl.began)])
    failed = etl.context("a", 0)
    etl.green("a", 5)
    minutes_of_a_day = 24 * 60
    forgotten: list[int] = []

    def dispatch(days: int) -> None:
        moment = etl.began + days * minutes_of_a_day * timedelta(minutes=1)
        dispatcher = etl.store.dispatcher(etl.hook, Transport(), database_time=lambda connection: moment)
        forgotten.append(dispatcher.once().forgotten)
        dispatcher.close()

    dispatch(13)
    assert len(marks(etl)) == 2
    etl.on_failure(dict(failed))
    assert etl.waiting == []
    dispatch(15)
    assert marks(etl) == []
    # the count is of ids, of which none is so old
    assert forgotten == [0, 0]
    etl.on_failure(dict(failed))
    assert etl.waiting == [30]
