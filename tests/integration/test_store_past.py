"""Messages that have left the store: what is remembered of them, on every database."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from sqlalchemy import select
from support.stores import Store, Transport, message, store_fixture  # noqa: F401 - a fixture

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.identity import Origin

LABELS = ("Tag", "Run", "DeliverConnId")
PAST = datetime(2020, 1, 1, tzinfo=timezone.utc)
LATER = datetime(2030, 5, 6, 7, 8, 9, tzinfo=timezone.utc)
MONDAY = Origin(dag_id="billing", run_id="monday", task_id="remind")


def labels(hook: DelayedStoreHook) -> dict[str, tuple[str | None, bool, str | None]]:
    """Return by id: the tag, whether the run is known, and the connection."""
    past = hook.tables.past
    with hook.engine.connect() as connection:
        rows = connection.execute(select(past.c.Id, *(past.c[name] for name in LABELS))).all()
    return {row.Id: (row.Tag, row.Run is not None, row.DeliverConnId) for row in rows}


def test_a_record_has_tag_run_and_connection_until_it_is_erased(store: Store):
    store.installed()
    hook = store.hook(origin=MONDAY)
    hook.send([message("sent", PAST, tag="ann"), message("bob's", PAST, tag="bob"), message("plain", PAST)])
    hook.send([message("cancelled", LATER, tag="ann")])
    assert store.dispatcher(hook, Transport()).run().dispatched == 3
    hook.cancel(["cancelled"])
    assert labels(hook) == {
        "sent": ("ann", True, "broker"),
        "bob's": ("bob", True, "broker"),
        "plain": (None, True, "broker"),
        "cancelled": ("ann", True, "broker"),
    }
    hook.erase(["sent", "cancelled"])
    known = labels(hook)
    assert known["sent"] == known["cancelled"] == (None, False, None)
    assert known["bob's"] == ("bob", True, "broker")


def test_a_message_of_a_queue_table_keeps_its_tag(store: Store):
    hook = store.installed("q", deliver_conn_id=None)
    hook.send([message("own", hook.now() - timedelta(seconds=1), tag="ann", destination="q")])
    assert store.dispatcher(hook, None).run().dispatched == 1
    assert labels(hook)["own"] == ("ann", False, None)
