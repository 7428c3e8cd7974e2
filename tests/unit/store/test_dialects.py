"""What a database server calls itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from airflow_delayed.errors import DelayedError
from airflow_delayed.store.dialects import dialect_of


def connected(name: str, *version: Any, **more: bool) -> Any:
    return SimpleNamespace(dialect=SimpleNamespace(name=name, server_version_info=version, **more))


@pytest.mark.parametrize(
    "connection, name",
    [
        (connected("postgresql", 15, 4), "PostgreSQL 15.4"),
        (connected("mysql", 8, 0, 36, is_mariadb=False), "MySQL 8.0.36"),
        (connected("mysql", 10, 11, 6, "MariaDB", 0, "deb12u1", is_mariadb=True), "MariaDB 10.11.6"),
        (connected("mssql", 16, 0, 4095, 4), "SQL Server 16.0.4095"),
        (connected("mssql"), "SQL Server"),
    ],
)
def test_name_and_version(connection: Any, name: str) -> None:
    assert dialect_of(connection).server_name(connection) == name


def test_an_unknown_database_is_an_error() -> None:
    oracle = connected("oracle", 23)
    with pytest.raises(DelayedError, match="no store can be kept in oracle; use one of PostgreSQL, MySQL, "):
        dialect_of(oracle).server_name(oracle)
