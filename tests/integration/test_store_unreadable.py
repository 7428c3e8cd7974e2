"""Rows that somebody else wrote, whatever is in them: each is judged alone, and shown; its neighbours go on."""

from __future__ import annotations

import random
import re
from datetime import datetime, timedelta, timezone

import pytest
from sqlalchemy import insert, text
from sqlalchemy.exc import DBAPIError
from support.lengths import length
from support.stores import Store, Transport, message

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.store.dispatch.report import DispatchFailed

pytestmark = pytest.mark.mariadb

SECOND = timedelta(seconds=1)
ROWS = length("random rows of a store", 150, 2000)
HEADERS = "headers: are not a JSON object in UTF-8"
#: By id: headers, and why they are refused.
POISON_HEADERS = {
    "brackets": (b"[" * 5000, HEADERS),
    "nested": (b'{"a":' + b"[" * 900 + b"]" * 900 + b"}", "headers: the value of 'a' must be text, not list"),
    "cut": (b'{"a": "b', HEADERS),
    "binary": (bytes(range(256)), HEADERS),
    "list": (b"[]", HEADERS),
    "number": (b'{"a": 1}', "headers: the value of 'a' must be text, not int"),
    "digits": (b"1" * 5000, HEADERS),
    "surrogate": (b'{"a": "\\ud800"}', "headers: holds half of a surrogate pair, which UTF-8 has no bytes for"),
}


def put(hook: DelayedStoreHook, name: str, **columns: object) -> None:
    """Insert a row as anybody with the right to INSERT can; a value may be SQL."""
    with hook.engine.begin() as connection:
        if connection.dialect.name == "mysql":
            connection.execute(text("SET SESSION sql_mode = 'ALLOW_INVALID_DATES'"))
        row = {"Id": name, "Destination": "q", "State": b"body", "Time": hook.now() - SECOND, "Headers": b"{}"}
        more = {"DeliverConnId": "broker", "RetryCount": 0, **columns}
        connection.execute(insert(hook.table).values({**row, **more}))
    if hook.engine.dialect.name == "mysql":
        # no other session has that mode
        hook.engine.dispose()


def dispatch(store: Store, hook: DelayedStoreHook, transport: Transport | None, **options: object) -> DispatchFailed:
    with pytest.raises(DispatchFailed) as caught:
        store.dispatcher(hook, transport, **options).run()
    return caught.value


def look(hook: DelayedStoreHook) -> list[str]:
    """Look at everything in every way, and return the ids that a list has."""
    found = list(hook.list())
    ids = [one.message_id for one in found]
    page = hook.page(limit=2)
    paged = {one.message_id for one in page.messages}
    for _ in found:
        if page.next is not None:
            page = hook.page(limit=2, after=page.next)
            paged |= {one.message_id for one in page.messages}
    # of rows without a time that can be read some may be passed over between two pages, but no others
    assert page.next is None
    assert paged >= {name for name in ids if re.fullmatch(r"m\d+", name)}
    for name in ids:
        hook.get(name)
        hook.content(name, body_limit=10)
    hook.counts(minutes=60, by_destination=True)
    assert hook.cancel(ids, dry_run=True).total == len(ids)
    return ids


@pytest.mark.parametrize("batch", [100, 1])
def test_headers_that_are_none(store: Store, batch):
    hook, transport = store.installed(), Transport()
    for name, (headers, _) in POISON_HEADERS.items():
        put(hook, name, Headers=headers)
    hook.send(message(f"m{n}", hook.now() - 2 * SECOND) for n in range(2))
    assert sorted(look(hook)) == sorted([*POISON_HEADERS, "m0", "m1"])
    assert hook.content("brackets", body_limit=10).headers is None
    error = dispatch(store, hook, transport, batch_size=batch)
    assert sorted(transport.ids) == ["m0", "m1"]
    assert error.failures == {name: reason for name, (_, reason) in POISON_HEADERS.items()}
    assert error.report.failed == len(POISON_HEADERS)
    assert store.given_up(hook)["brackets"] == ("failed", 1, HEADERS)
    assert sorted(look(hook)) == sorted(POISON_HEADERS)


#: By database: times that Python cannot hold, as far as the database takes them for a time.
TIMES = {
    "sqlite": ("'tomorrow'", "x'ff'", "17", "'0000-00-00 00:00:00.000000'"),
    "postgresql": ("'infinity'", "'-infinity'", "'0044-03-15 12:00:00 BC'", "'20000-01-01'"),
    "mysql": ("'0000-00-00'",),
}


def test_a_due_time_that_is_none_is_refused_by_the_database(store: Store):
    hook, transport = store.installed(), Transport()
    for number, time in enumerate(TIMES[hook.engine.dialect.name]):
        with pytest.raises(DBAPIError, match="Time_check"):
            put(hook, f"none-{number}", Time=text(time))
    for year in (1, 9999):
        put(hook, f"year-{year}", Time=datetime(year, 12, 31, 23, 59, 59, 999999, timezone.utc))
    assert look(hook) == ["year-1", "year-9999"]
    dispatched = store.dispatcher(hook, transport).run()
    assert (dispatched.dispatched, transport.ids, look(hook)) == (1, ["year-1"], ["year-9999"])


def test_counts_and_ids_and_destinations_at_their_ends(store: Store):
    hook, transport = store.installed("q"), Transport(refused={"counted"})
    put(hook, "counted", RetryCount=2**31 - 1)
    put(hook, "below", RetryCount=-(2**31))
    put(hook, "i" * 250)
    put(hook, "two\nlines")
    put(hook, "empty", Destination="")
    put(hook, "untagged", Tag="")
    names = ["a b ", "a/b", "n" * 200, ".", "'\"`", "%s", "\x01"]
    for number, name in enumerate(names):
        put(hook, f"queue-{number}", Destination=name, DeliverConnId=None)
    put(hook, "good", DeliverConnId=None)
    look(hook)
    error = dispatch(store, hook, transport, deliver_conn_ids=["broker", hook.conn_id])
    assert transport.ids == ["below"]
    assert set(error.failures) == {"counted", "i" * 250, "two\nlines", "empty", "untagged"} | {
        f"queue-{number}" for number in range(len(names))
    }
    assert "\n" not in str(error)
    assert [body for _, body in store.rows(hook, "q")] == [b"body"]
    look(hook)


#: What random rows are made of, beside random bytes and text.
PIECES = [b"{", b"}", b"[", b'"a"', b":", b",", b"1e999", b"\\ud800", b"null", b"\xff", b"\0", b"\n", "ü".encode()]


@pytest.mark.fuzz
def test_random_rows(store: Store):
    """Whatever is in a row, it is delivered or rejected in the same run as its neighbours."""
    hook, transport = store.installed("q"), Transport()
    chance = random.Random(20260131)
    dialect = hook.engine.dialect.name

    def bits() -> bytes:
        return b"".join(chance.choices([*PIECES, chance.randbytes(3)], k=chance.randrange(12)))

    def words(most: int) -> str:
        text = bits().decode(errors="replace")[:most]
        return text.replace("\0", "") if dialect == "postgresql" else text

    def time() -> object:
        return hook.now() + chance.choice([-SECOND, 3600 * SECOND])

    for number in range(ROWS):
        columns = {
            "Id": lambda number=number: f"{words(200)}{number}",
            "Destination": lambda: words(200),
            "State": bits,
            "Headers": lambda: chance.choice([bits(), b'{"a":"%s"}' % bits(), b"[" * chance.randrange(9000)]),
            "Time": time,
            "ExpiresAt": time,
            "NextTry": time,
            "Tag": lambda: words(250),
            "RetryCount": lambda: chance.choice([-(2**31), -1, 7, 2**31 - 1]),
            "Digest": lambda: chance.choice([None, bits()[:16]]),
            "DeliverConnId": lambda: None,
        }
        chosen = chance.sample(sorted(columns), k=chance.randrange(1, 4))
        put(hook, f"r{number}", **{name: columns[name]() for name in chosen})
    hook.send(message(f"m{n}", hook.now() - 2 * SECOND) for n in range(20))
    everything = look(hook)
    # two workers of MariaDB may have a deadlock, after which one tries again
    patience = {"time_to_trigger_store_circuit_breaker": timedelta(seconds=30)}
    options = {"batch_size": 10, "deliver_conn_ids": ["broker", hook.conn_id], **patience}
    error = dispatch(store, hook, transport, **options)
    assert {f"m{n}" for n in range(20)} <= set(transport.ids)
    report = error.report
    assert report.failed == sum(reason == "failed" for reason, _, _ in store.given_up(hook).values()) > ROWS / 4
    # what else is left is not due, or not tried yet
    assert len(everything) == report.dispatched + report.failed + report.expired + hook.count()
    assert hook.counts().due == 0
    assert store.dispatcher(hook, transport, **options).run().dispatched == 0
    look(hook)
