"""Messages that have left the store: what is remembered of them, on every database."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from support.stores import Store, Transport, message

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.identity import Origin, SentBy
from airflow_delayed.store.dispatch.report import DispatchFailed

pytestmark = pytest.mark.mariadb

PAST = datetime(2020, 1, 1, tzinfo=timezone.utc)
HOUR = timedelta(hours=1)
LATER = datetime(2030, 5, 6, 7, 8, 9, tzinfo=timezone.utc)
MONDAY = Origin(dag_id="billing", run_id="monday", task_id="remind")
LEFT = ["dispatched", "cancelled"]


def found(hook: DelayedStoreHook, **wanted) -> list[str]:
    return [one.message_id for one in hook.page(**{"state": LEFT, **wanted}).remembered]


@pytest.fixture
def hook(store: Store) -> DelayedStoreHook:
    """Three messages were dispatched, then two were cancelled; one waits, and one has failed."""
    store.installed()
    made = store.hook(origin=MONDAY)
    made.send([message("sent", PAST, tag="ann"), message("bob's", PAST + HOUR, tag="bob")])
    store.hook().send([message("plain", PAST, destination="r"), message("fails", PAST, destination="gone", tag="ann")])
    made.send([message("off", LATER, tag="ann"), message("away", LATER), message("waits", LATER, tag="ann")])
    with pytest.raises(DispatchFailed):
        store.dispatcher(made, Transport(missing={"gone"}), number_of_retries=0).run()
    made.cancel(["off", "away"])
    return made


def test_messages_that_have_left_are_found_by_each_criterion(hook: DelayedStoreHook):
    # the last one first
    assert found(hook) == ["away", "off", "bob's", "plain", "sent"]
    assert found(hook, state="dispatched") == ["bob's", "plain", "sent"]
    assert found(hook, tag="ann") == ["off", "sent"]
    assert found(hook, destination="r") == ["plain"]
    assert found(hook, due_from=PAST + HOUR) == ["away", "off", "bob's"]
    assert found(hook, due_until=PAST + HOUR) == ["plain", "sent"]
    assert found(hook, deliver_conn_id="another") == []
    assert found(hook, sent_by=SentBy(dag_id="billing", task_id="remind")) == ["away", "off", "bob's", "sent"]
    assert found(hook, ids=["sent", "waits"]) == ["sent"]
    sent = hook.get("sent")
    assert (sent.tag, sent.deliver_conn_id, sent.origin, sent.due_at) == ("ann", "broker", MONDAY, PAST)
    with pytest.raises(ValueError, match="without other states"):
        hook.page(state=["failed", "cancelled"])


def test_pages_have_each_message_once(hook: DelayedStoreHook):
    first = hook.page(state=LEFT, limit=2)
    second = hook.page(state=LEFT, limit=2, after=first.next)
    last = hook.page(state=LEFT, limit=2, after=second.next)
    pages = [[one.message_id for one in page.remembered] for page in (first, second, last)]
    assert pages == [["away", "off"], ["bob's", "plain"], ["sent"]]
    assert last.next is None


def test_what_was_erased_or_stored_anew_is_not_found(hook: DelayedStoreHook):
    hook.erase(["sent", "off"])
    assert found(hook) == ["away", "bob's", "plain"]
    assert (hook.get("sent").tag, hook.get("sent").origin) == (None, None)


def test_a_message_of_a_queue_table_keeps_its_tag(store: Store):
    own = store.installed("q", deliver_conn_id=None)
    own.send([message("own", own.now() - HOUR, tag="ann", destination="q")])
    assert store.dispatcher(own, None).run().dispatched == 1
    assert found(own, tag="ann", deliver_conn_id=own.conn_id) == ["own"]


def test_an_erase_by_tag_leaves_the_tag_nowhere(hook: DelayedStoreHook):
    hook.erase(tag="ann")
    assert found(hook, tag="ann") == []
    assert hook.get("sent").tag is None
    assert found(hook, tag="bob") == ["bob's"]
