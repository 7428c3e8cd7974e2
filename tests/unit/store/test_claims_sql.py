"""The claim in the words of each database, those included that the tests cannot run."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from sqlalchemy.dialects import mysql, postgresql, sqlite

from airflow_delayed.store.database import slices
from airflow_delayed.store.dispatch import claim
from airflow_delayed.store.schema import store_tables

NOW = datetime(2030, 1, 1, tzinfo=timezone.utc)


class Recorder:
    """Takes the place of a connection and keeps the statements, of which the first returns the ids."""

    def __init__(self, dialect, ids=()) -> None:
        self.dialect = dialect
        self.ids = ids
        self.statements = []

    @property
    def statement(self):
        return self.statements[0]

    def execute(self, statement, parameters=None):
        self.statements.append(statement)
        return Result(self.ids if len(self.statements) == 1 else ())


class Result(list):
    """A result of ids, or without rows."""

    def all(self):
        return self

    def scalars(self):
        return self

    def first(self):
        return None


@pytest.mark.parametrize("since", [None, NOW - timedelta(days=1)])
@pytest.mark.parametrize(
    "dialect, wanted",
    [
        (postgresql.dialect(), "LIMIT %(limit)s FOR UPDATE SKIP LOCKED"),
        (mysql.dialect(), "LIMIT %s, %s"),
        (sqlite.dialect(), "LIMIT ? OFFSET ?"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_claim_locks_rows_and_passes_over_locked_ones(dialect, wanted, since):
    recorder = Recorder(dialect)
    claim.claim_due(
        recorder,
        store_tables(),
        claim.ClaimRequest(deliver_conn_id="broker", due_by=NOW, limit=500, since=since),
        now=NOW,
        dispatcher="me",
        until=NOW + timedelta(seconds=30),
    )
    # SQLAlchemy 2.1 casts the limit
    statement = " ".join(str(recorder.statement.compile(dialect=dialect)).split()).replace("::INTEGER", "")
    assert wanted in statement
    quote = dialect.identifier_preparer
    time = f"{quote.quote_identifier('delayed_messages')}.{quote.quote_identifier('Time')}"
    assert f"ORDER BY {time}" in statement
    assert (f"{time} >= " in statement) == (since is not None)
    # all in one statement where the database can do it
    assert ("INSERT INTO" in statement) == (dialect.name == "postgresql")


@pytest.mark.parametrize("count", [0, 1, 999, 1000, 1001, 2500])
def test_ids_are_cut_into_pieces_that_fit(count):
    ids = [str(number) for number in range(count)]
    pieces = list(slices(ids))
    assert [one for piece in pieces for one in piece] == ids
    assert all(0 < len(piece) <= 1000 for piece in pieces)


TABLE = "`a``s`.`delayed_messages`"


def test_a_claim_on_mysql_reads_by_due_time_and_locks_by_key():
    """Else it locks all that it reads, such as what other connections deliver."""
    recorder = Recorder(mysql.dialect(), ["a"])
    wanted = claim.ClaimRequest(deliver_conn_id="broker", due_by=NOW, limit=500)
    claim.claim_due(recorder, store_tables("the `t`"), wanted, now=NOW, dispatcher="me", until=NOW)
    reading, locking = (" ".join(str(one.compile(dialect=mysql.dialect())).split()) for one in recorder.statements[:2])
    assert "FROM `the ``t``` FORCE INDEX (`the ``t``_Time`)" in reading
    assert "FOR UPDATE" not in reading
    assert "FROM `the ``t``` FORCE INDEX (PRIMARY)" in locking
    assert locking.endswith("FOR UPDATE SKIP LOCKED")


@pytest.mark.parametrize("dialect", [postgresql.dialect(), mysql.dialect(), sqlite.dialect()])
def test_a_claim_of_one_destination_and_one_without_others(dialect):
    def statement(**fields) -> str:
        recorder = Recorder(dialect)
        wanted = claim.ClaimRequest(deliver_conn_id="broker", due_by=NOW, limit=500, **fields)
        claim.claim_due(recorder, store_tables(), wanted, now=NOW, dispatcher="me", until=NOW)
        return " ".join(str(recorder.statement.compile(dialect=dialect)).split())

    quote = dialect.identifier_preparer
    destination = f"{quote.quote_identifier('delayed_messages')}.{quote.quote_identifier('Destination')}"
    plain, single, others = statement(), statement(destination="sms"), statement(excluded=["sms", "mail"])
    assert f"{destination} = " not in plain
    assert f"{destination} = " in single
    assert f"{destination} NOT IN " in others
    if dialect.name == "mysql":
        # the index has the messages of a destination in the order of due time
        assert "FORCE INDEX (`delayed_messages_Destination`)" in single
        assert "FORCE INDEX (`delayed_messages_Time`)" in others
