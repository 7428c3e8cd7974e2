"""The claim in the words of each database, those included that the tests cannot run."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from sqlalchemy.dialects import mssql, mysql, postgresql, sqlite

from airflow_delayed.store import claiming, claims
from airflow_delayed.store.by_id import delete_rows, update_rows
from airflow_delayed.store.schema import store_tables

NOW = datetime(2030, 1, 1, tzinfo=timezone.utc)


class Recorder:
    """Takes the place of a connection and keeps the first statement."""

    def __init__(self, dialect) -> None:
        self.dialect = dialect
        self.statement = None

    def execute(self, statement, parameters=None):
        self.statement = statement if self.statement is None else self.statement
        return Nothing()


class Nothing(list):
    """A result without rows."""

    def all(self):
        return self

    def first(self):
        return None


@pytest.mark.parametrize("since", [None, NOW - timedelta(days=1)])
@pytest.mark.parametrize(
    "dialect, wanted",
    [
        (postgresql.dialect(), "LIMIT %(limit)s::INTEGER FOR UPDATE SKIP LOCKED"),
        (mysql.dialect(), "LIMIT %s FOR UPDATE SKIP LOCKED"),
        (mssql.dialect(), "WITH (READPAST, UPDLOCK, ROWLOCK) WHERE"),
        (sqlite.dialect(), "LIMIT ? OFFSET ?"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_claim_locks_rows_and_passes_over_locked_ones(dialect, wanted, since):
    recorder = Recorder(dialect)
    claiming.claim(
        recorder,
        store_tables(),
        claiming.Wanted(deliver_conn_id="broker", due_by=NOW, limit=500, since=since),
        now=NOW,
        dispatcher="me",
        until=NOW + timedelta(seconds=30),
    )
    statement = " ".join(str(recorder.statement.compile(dialect=dialect)).split())
    assert wanted in statement
    quote = dialect.identifier_preparer
    time = f"{quote.quote_identifier('delayed_messages')}.{quote.quote_identifier('Time')}"
    assert f"ORDER BY {time}" in statement
    assert (f"{time} >= " in statement) == (since is not None)
    if dialect.name == "mssql":
        assert statement.startswith("SELECT TOP ")
    # all in one statement where the database can do it
    assert ("INSERT INTO" in statement) == (dialect.name == "postgresql")


@pytest.mark.parametrize("alone", [True, False])
def test_a_claim_alone_asks_nothing_of_what_is_remembered(alone):
    """The key of the table says whether it was alone; any other claim leaves what others hold."""
    recorder = Recorder(postgresql.dialect())
    wanted = claiming.Wanted(
        deliver_conn_id="broker", due_by=NOW, limit=500, since=NOW, alone=alone, passed=["a"] if alone else []
    )
    claiming.claim(recorder, store_tables(), wanted, now=NOW, dispatcher="me", until=NOW)
    statement = " ".join(str(recorder.statement.compile(dialect=postgresql.dialect())).split())
    assert ('FROM "delayed_messages_past"' in statement) != alone
    assert ("ON CONFLICT" in statement) != alone
    assert ('"delayed_messages"."Id" != ALL (' in statement) == alone


@pytest.mark.parametrize("count", [0, 1, 999, 1000, 1001, 2500])
def test_ids_are_cut_into_pieces_that_fit(count):
    ids = [str(number) for number in range(count)]
    pieces = list(claims.slices(ids))
    assert [one for piece in pieces for one in piece] == ids
    assert all(0 < len(piece) <= 1000 for piece in pieces)


TABLE = "`a``s`.`delayed_messages`"


@pytest.mark.parametrize(
    "dialect, deleted, updated",
    [
        (
            mysql.dialect(),
            f"DELETE FROM {TABLE} USING {TABLE} FORCE INDEX (PRIMARY) WHERE {TABLE}.`Id` IN (",
            f"UPDATE {TABLE} FORCE INDEX (PRIMARY) SET `Tag`=",
        ),
        (
            postgresql.dialect(),
            'DELETE FROM "a`s"."delayed_messages" WHERE',
            'UPDATE "a`s"."delayed_messages" SET "Tag"=',
        ),
        (mssql.dialect(), "DELETE FROM [a`s].[delayed_messages] WHERE", "UPDATE [a`s].[delayed_messages] SET [Tag]="),
        (sqlite.dialect(), 'DELETE FROM "a`s"."delayed_messages" WHERE', 'UPDATE "a`s"."delayed_messages" SET "Tag"='),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_rows_are_changed_by_their_ids_alone(dialect, deleted, updated):
    table = store_tables(schema="a`s").messages
    assert " ".join(str(delete_rows(table, ["m"]).compile(dialect=dialect)).split()).startswith(deleted)
    changed = update_rows(table, ["m"]).values(Tag="t")
    assert " ".join(str(changed.compile(dialect=dialect)).split()).startswith(updated)


def test_a_claim_on_mysql_reads_by_due_time():
    """Else it sorts, and so locks, all that is due."""
    recorder = Recorder(mysql.dialect())
    wanted = claiming.Wanted(deliver_conn_id="broker", due_by=NOW, limit=500)
    claiming.claim(recorder, store_tables("the `t`"), wanted, now=NOW, dispatcher="me", until=NOW)
    statement = str(recorder.statement.compile(dialect=mysql.dialect()))
    assert "FROM `the ``t``` FORCE INDEX (`the ``t``_Time`)" in " ".join(statement.split())
