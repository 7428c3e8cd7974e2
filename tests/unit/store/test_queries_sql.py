"""What each database is asked."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest
from sqlalchemy.dialects import mysql, postgresql, sqlite

from airflow_delayed.store.changes import locate
from airflow_delayed.store.filters import MessageFilter
from airflow_delayed.store.schema import store_tables

NOW = datetime(2030, 1, 1, tzinfo=timezone.utc)
TABLES = store_tables("store", "room")


class Recorder:
    """Takes the place of a connection to an empty store, and keeps the statements."""

    def __init__(self, dialect) -> None:
        self.dialect = dialect
        self.statements = []

    def execute(self, statement):
        self.statements.append(statement)
        return Nothing()


class Nothing(list):
    """A result without rows."""

    def scalars(self):
        return self

    def all(self):
        return self


@pytest.mark.parametrize(
    "dialect, source, end",
    [
        (postgresql, '"room"."store"', "FOR UPDATE SKIP LOCKED"),
        # or it would read, and lock, a small table from end to end
        (mysql, "`room`.`store` FORCE INDEX (PRIMARY)", "FOR UPDATE SKIP LOCKED"),
        (sqlite, '"room"."store"', '."Id"'),
    ],
)
def test_messages_are_locked_in_one_order(dialect, source, end):
    recorder = Recorder(dialect.dialect())
    locate(recorder, TABLES, ["a", "b"], NOW, MessageFilter(tag="t"), lock=True)
    sql = " ".join(str(recorder.statements[0].compile(dialect=recorder.dialect)).split())
    assert f"FROM {source}" in sql
    assert "ORDER BY" in sql
    assert sql.endswith(end)
    assert "State" not in sql
