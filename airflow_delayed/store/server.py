"""What a database server calls itself."""

from __future__ import annotations

from sqlalchemy import Connection

from airflow_delayed.errors import DelayedError

_NAMES = {
    "postgresql": "PostgreSQL",
    "mysql": "MySQL",
    "mariadb": "MariaDB",
    "sqlite": "SQLite",
    "mssql": "SQL Server",
}


def server_name(connection: Connection) -> str:
    """Return name and version of what answers, as "PostgreSQL 15.4".

    :raises DelayedError: a database that is not known.
    """
    dialect = connection.dialect
    if dialect.name not in _NAMES:
        raise DelayedError(f"no store can be kept in {dialect.name}; use one of {', '.join(_NAMES.values())}")
    # MariaDB answers to MySQL's dialect too
    name = _NAMES["mariadb" if getattr(dialect, "is_mariadb", False) else dialect.name]
    version = getattr(dialect, "server_version_info", None) or ()
    return " ".join([name, *([".".join(map(str, version[:3]))] if version else [])])
