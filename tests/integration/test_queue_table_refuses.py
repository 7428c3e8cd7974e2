"""What a queue table refuses: a row fails by itself, a table backs off by itself, and no other message is held up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from random import Random

import pytest
from support.rabbitmq import eventually
from support.stores import Store, message

from airflow_delayed.errors import DelayedError, TransportUnavailable
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.store.dispatch.report import DispatchFailed

SECOND = timedelta(seconds=1)
#: Longer than the others, also when it is compressed, and with characters that Latin 1 does not have.
BAD = {"body": Random(1).randbytes(4000), "headers": {"city": "Łódź"}}
_FUNCTION = """CREATE FUNCTION {s}check_row() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN IF length(new.body) > 100 THEN RAISE EXCEPTION 'too much'; END IF; RETURN new; END $$"""
RULES = {
    ("sqlite", "trigger"): [
        """CREATE TRIGGER "check_row" BEFORE INSERT ON "strict" WHEN length(new.body) > 100
        BEGIN SELECT RAISE(ABORT, 'too much'); END"""
    ],
    ("postgres", "trigger"): [
        _FUNCTION,
        'CREATE TRIGGER check_row BEFORE INSERT ON {s}"strict" FOR EACH ROW EXECUTE FUNCTION {s}check_row()',
    ],
    ("postgres", "trigger at the commit"): [
        _FUNCTION,
        """CREATE CONSTRAINT TRIGGER check_row AFTER INSERT ON {s}"strict" DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW EXECUTE FUNCTION {s}check_row()""",
    ],
    ("postgres", "constraint"): ['ALTER TABLE {s}"strict" ADD CHECK (length(body) < 100)'],
    ("postgres", "encoding"): ["""ALTER TABLE {s}"strict" ADD CHECK (convert_to(headers, 'LATIN1') IS NOT NULL)"""],
    ("postgres", "length"): ['CREATE INDEX ON {s}"strict" (body)'],
    ("mariadb", "trigger"): [
        """CREATE TRIGGER {s}"check_row" BEFORE INSERT ON {s}"strict" FOR EACH ROW
        IF length(new.body) > 100 THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'too much'; END IF"""
    ],
    ("mariadb", "constraint"): ['ALTER TABLE {s}"strict" ADD CHECK (length(body) < 100)'],
    ("mariadb", "encoding"): ['ALTER TABLE {s}"strict" MODIFY headers LONGTEXT CHARACTER SET latin1 NOT NULL'],
    ("mariadb", "length"): ['ALTER TABLE {s}"strict" MODIFY body VARBINARY(100)'],
}


@pytest.fixture
def hook(store: Store) -> Iterator[DelayedStoreHook]:
    hook = store.installed("strict", "good", deliver_conn_id=None)
    yield hook
    if hook.engine.dialect.name == "postgresql":
        store.sql(hook, "DROP FUNCTION IF EXISTS {s}check_row() CASCADE")


@pytest.mark.parametrize("store, rule", RULES, indirect=["store"])
def test_a_row_that_its_table_refuses_costs_no_other_message(
    store: Store, rule: str, hook: DelayedStoreHook, request: pytest.FixtureRequest
) -> None:
    for statement in RULES[request.node.callspec.params["store"], rule]:
        store.sql(hook, statement)
    due = hook.now() - 60 * SECOND
    names = [f"m{number}" for number in range(9)]
    hook.send(message(name, due + number * SECOND, destination="strict") for number, name in enumerate(names))
    hook.send(
        [
            message("bad", due + 3.5 * SECOND, destination="strict", **BAD),
            message("other", due + 20 * SECOND, destination="good"),
        ]
    )
    with pytest.raises(DispatchFailed) as raised:
        store.dispatcher(hook, number_of_retries=0).run()
    assert raised.value.report.dispatched == 10
    assert list(raised.value.failures) == ["bad"]
    assert raised.value.failures["bad"].startswith("table 'strict': ")
    assert store.given_up(hook)["bad"][1] == 1
    assert [json.loads(headers)["NServiceBus.MessageId"] for headers, _ in store.rows(hook, "strict")] == names
    assert len(store.rows(hook, "good")) == 1


@pytest.mark.parametrize("store", ["sqlite", "postgres", "mariadb"], indirect=True)
def test_a_row_that_is_refused_is_tried_again_and_counts(store: Store, hook: DelayedStoreHook, request) -> None:
    for statement in RULES[request.node.callspec.params["store"], "trigger"]:
        store.sql(hook, statement)
    hook.send([message("bad", hook.now() - SECOND, destination="strict", **BAD)])
    hook.send([message("m1", hook.now() - SECOND, destination="strict")])
    assert store.dispatcher(hook).run().dispatched == 1
    # on a slow machine more than once
    assert [(name, count >= 1) for name, count in store.failures_of(hook).items()] == [("bad", True)]


def test_a_table_that_takes_nothing_backs_off_and_counts_no_retry(store: Store, hook: DelayedStoreHook, caplog) -> None:
    dispatcher = store.dispatcher(hook, number_of_retries=0)
    hook.send(message(f"first-{name}", hook.now(), destination=name) for name in ("strict", "good"))
    assert dispatcher.once().dispatched == 2
    store.sql(hook, 'ALTER TABLE {s}"strict" RENAME COLUMN "body" TO "content"')
    hook.send(message(f"then-{name}", hook.now(), destination=name) for name in ("strict", "good"))
    assert dispatcher.once().dispatched == 1
    assert store.failures_of(hook) == {"then-strict": 0}
    assert "destination 'strict' takes no messages: table 'strict': " in caplog.text
    store.sql(hook, 'ALTER TABLE {s}"strict" RENAME COLUMN "content" TO "body"')
    eventually(lambda: dispatcher.once().dispatched == 1)
    assert len(store.rows(hook, "strict")) == 2


def test_a_store_that_refuses_a_row_is_not_away(store: Store, hook: DelayedStoreHook, request) -> None:
    # not the table of messages, which the next test is given
    for statement in RULES[request.node.callspec.params["store"], "trigger"]:
        store.sql(hook, statement.replace('"strict"', '"delayed_messages"').replace("new.body", 'new."State"'))
    try:
        with pytest.raises(DelayedError) as raised:
            hook.send([message("bad", hook.now(), destination="strict", **BAD)])
        assert not isinstance(raised.value, TransportUnavailable)
    finally:
        if hook.engine.dialect.name != "postgresql":
            store.sql(hook, 'DROP TRIGGER {s}"check_row"')
