"""What a database server calls itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import create_engine

from airflow_delayed.errors import DelayedError
from airflow_delayed.store.dialects import dialect_of
from airflow_delayed.store.engine import prepare
from airflow_delayed.store.script import install_script


def connected(name: str, *version: Any, **more: bool) -> Any:
    return SimpleNamespace(dialect=SimpleNamespace(name=name, server_version_info=version, **more))


@pytest.mark.parametrize(
    "connection, name",
    [
        (connected("postgresql", 15, 4), "PostgreSQL 15.4"),
        (connected("mysql", 8, 0, 36, is_mariadb=False), "MySQL 8.0.36"),
        (connected("mysql", 10, 11, 6, "MariaDB", 0, "deb12u1", is_mariadb=True), "MariaDB 10.11.6"),
        (connected("sqlite"), "SQLite"),
    ],
)
def test_name_and_version(connection: Any, name: str) -> None:
    assert dialect_of(connection).server_name(connection) == name


@pytest.mark.parametrize("name", ["oracle", "mssql"])
def test_a_database_that_keeps_no_store_is_refused_before_it_is_connected(name: str) -> None:
    engine = create_engine("sqlite:////no/such/folder/store.db")
    engine.dialect.name = name
    with pytest.raises(DelayedError, match=f"no store can be kept in {name}; use one of PostgreSQL, MySQL, "):
        prepare(engine)
    with pytest.raises(DelayedError, match=f"no store can be kept in {name}; use one of PostgreSQL, MySQL, "):
        install_script(name)
