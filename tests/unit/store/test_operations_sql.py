"""What each database is asked, SQL Server included, which the tests cannot run."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from sqlalchemy import create_mock_engine, select
from sqlalchemy.dialects import mssql, mysql, postgresql, sqlite

from airflow_delayed.errors import DelayedError
from airflow_delayed.store.content import beginning as first_bytes
from airflow_delayed.store.content import length
from airflow_delayed.store.counts import beginning
from airflow_delayed.store.criteria import Criteria
from airflow_delayed.store.engine import limit_statements
from airflow_delayed.store.look import locking
from airflow_delayed.store.ordered import behind
from airflow_delayed.store.schema import store_tables
from airflow_delayed.store.states import MessageState, in_state

TABLES = store_tables("store", "room")
NOW = datetime(2030, 1, 1, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    "dialect, source, end",
    [
        (postgresql, '"room"."store"', "FOR UPDATE SKIP LOCKED"),
        # or it would read, and lock, a small table from end to end
        (mysql, "`room`.`store` FORCE INDEX (PRIMARY)", "FOR UPDATE SKIP LOCKED"),
        (mssql, "[room].[store] WITH (READPAST, UPDLOCK, ROWLOCK)", ".[Id]"),
        (sqlite, '"room"."store"', '."Id"'),
    ],
)
def test_messages_are_locked_in_one_order(dialect, source, end):
    statement = locking(TABLES, TABLES.messages, ["a", "b"], Criteria(tag="t"))
    told = " ".join(str(statement.compile(dialect=dialect.dialect())).split())
    assert f"FROM {source}" in told
    assert "ORDER BY" in told
    assert told.endswith(end)
    assert "State" not in told


@pytest.mark.parametrize(
    "dialect, hour, minute",
    [
        (postgresql, "date_trunc(", "date_trunc("),
        (
            mysql,
            "date_format(`room`.`store`.`Time`, '%Y-%m-%d %H')",
            "date_format(`room`.`store`.`Time`, '%Y-%m-%d %H:%i')",
        ),
        (
            mssql,
            "convert(VARCHAR(13), [room].[store].[Time], 120)",
            "convert(VARCHAR(16), [room].[store].[Time], 120)",
        ),
        (sqlite, "substr(", "substr("),
    ],
)
def test_hours_and_minutes(dialect, hour, minute):
    made = dialect.dialect()

    def told(span: timedelta) -> str:
        statement = select(beginning(TABLES.messages.c.Time, span, made.name))
        return str(statement.compile(dialect=made)).replace("%%", "%")

    assert hour in told(timedelta(hours=1))
    assert minute in told(timedelta(minutes=1))


def test_hours_of_a_database_that_is_not_known():
    with pytest.raises(DelayedError, match="count by hours on oracle; give hours=0 and minutes=0"):
        beginning(TABLES.messages.c.Time, timedelta(hours=1), "oracle")


@pytest.mark.parametrize(
    "dialect, told",
    [(postgresql, "substr("), (mysql, "substr("), (sqlite, "substr("), (mssql, "substring([room].[store].[State], ")],
)
def test_the_first_bytes_of_a_body(dialect, told):
    made = dialect.dialect()
    statement = select(first_bytes(TABLES.messages.c.State, 5, made.name), length(TABLES.messages.c.State, made.name))
    assert told in str(statement.compile(dialect=made))


@pytest.mark.parametrize(
    "function", [lambda column: first_bytes(column, 5, "oracle"), lambda column: length(column, "oracle")]
)
def test_the_first_bytes_in_a_database_that_is_not_known(function):
    with pytest.raises(DelayedError, match="read a part of a message in oracle"):
        function(TABLES.messages.c.State)


@pytest.mark.parametrize("dialect", [postgresql, mysql, mssql, sqlite])
@pytest.mark.parametrize("state", [state for state in MessageState if state is not MessageState.FAILED])
def test_each_state_is_a_condition(dialect, state):
    statement = select(TABLES.messages.c.Id).where(in_state(TABLES, state, NOW))
    told = str(statement.compile(dialect=dialect.dialect()))
    # only who asks for what is in flight may begin with what is remembered
    assert ("EXISTS" in told, "coalesce((SELECT" in told) == (
        state is MessageState.IN_FLIGHT,
        state is not MessageState.IN_FLIGHT,
    )


@pytest.mark.parametrize("dialect", [postgresql, mysql, mssql, sqlite])
def test_what_comes_behind_a_place(dialect):
    made = dialect.dialect()
    told = str(
        select(TABLES.messages.c.Id).where(*behind(TABLES.messages, (NOW, "a"), made.name)).compile(dialect=made)
    )
    # PostgreSQL guesses well how much is left only by the short form, which SQL Server does not have
    assert (") > (" in told, " OR " in told) == (dialect is postgresql, dialect is not postgresql)


def test_statements_of_a_database_that_is_not_known_are_not_limited():
    oracle = create_mock_engine("sqlite://", lambda *_: None)
    oracle.dialect.name = "oracle"
    with pytest.raises(DelayedError, match="limit statements in oracle"):
        limit_statements(oracle, 30)
