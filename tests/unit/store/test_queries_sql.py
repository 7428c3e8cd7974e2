"""What each database is asked."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest
from sqlalchemy import select
from sqlalchemy.dialects import mysql, postgresql, sqlite

from airflow_delayed.store.changes import locate
from airflow_delayed.store.database import TimeUnit
from airflow_delayed.store.dialects import dialect_named
from airflow_delayed.store.filters import MessageFilter, MessageState, in_state
from airflow_delayed.store.queries import behind_place
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


@pytest.mark.parametrize(
    "dialect, hour, minute",
    [
        (postgresql, "date_trunc(", "date_trunc("),
        (
            mysql,
            "date_format(`room`.`store`.`Time`, '%Y-%m-%d %H')",
            "date_format(`room`.`store`.`Time`, '%Y-%m-%d %H:%i')",
        ),
        (sqlite, "substr(", "substr("),
    ],
)
def test_hours_and_minutes(dialect, hour, minute):
    made = dialect.dialect()

    def sql(unit: TimeUnit) -> str:
        statement = select(dialect_named(made.name).truncated(TABLES.messages.c.Time, unit))
        return str(statement.compile(dialect=made)).replace("%%", "%")

    assert hour in sql("hour")
    assert minute in sql("minute")


@pytest.mark.parametrize(
    "dialect, sql",
    [(postgresql, "substr("), (mysql, "substr("), (sqlite, "substr(")],
)
def test_the_first_bytes_of_a_body(dialect, sql):
    made = dialect.dialect()
    store = dialect_named(made.name)
    statement = select(store.beginning(TABLES.messages.c.State, 5), store.length(TABLES.messages.c.State))
    assert sql in str(statement.compile(dialect=made))


@pytest.mark.parametrize("dialect", [postgresql, mysql, sqlite])
@pytest.mark.parametrize("state", [state for state in MessageState if state is not MessageState.FAILED])
def test_each_state_is_a_condition(dialect, state):
    statement = select(TABLES.messages.c.Id).where(in_state(TABLES, state))
    sql = str(statement.compile(dialect=dialect.dialect()))
    # only who asks for what is in flight may begin with what is remembered
    assert ("EXISTS" in sql, "coalesce((SELECT" in sql) == (
        state is MessageState.IN_FLIGHT,
        state is not MessageState.IN_FLIGHT,
    )


@pytest.mark.parametrize("dialect", [postgresql, mysql, sqlite])
def test_what_comes_behind_a_place(dialect):
    made = dialect.dialect()
    conditions = behind_place(TABLES.messages, dialect_named(made.name))
    sql = str(select(TABLES.messages.c.Id).where(*conditions).compile(dialect=made))
    # PostgreSQL guesses well how much is left only by the short form
    assert (") > (" in sql, " OR " in sql) == (dialect is postgresql, dialect is not postgresql)
