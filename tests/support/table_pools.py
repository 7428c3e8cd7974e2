"""Tables of a store for a test, made once in each process and emptied for the next test.

To make them takes longer than most tests: eight tables with their indexes, each looked for before.
"""

from __future__ import annotations

import os
import re
import tempfile
from abc import ABC, abstractmethod
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
from sqlalchemy import Connection, Engine, MetaData, Table, create_engine, delete, select, text

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.store.api import engine_options, prepare
from airflow_delayed.store.schema import VERSION, Tables, store_tables
from support.servers import SERVERS

#: What tells whether a test has changed a table: its columns, indexes and constraints, each with the table's name.
_SHAPES = {
    "postgresql": (
        """SELECT t.relname, a.attname, a.attnum, format_type(a.atttypid, a.atttypmod), a.attnotnull
        FROM pg_attribute a JOIN pg_class t ON t.oid = a.attrelid JOIN pg_namespace n ON n.oid = t.relnamespace
        WHERE n.nspname = :schema AND t.relkind = 'r' AND a.attnum > 0""",
        "SELECT tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = :schema",
        """SELECT t.relname, c.conname, pg_get_constraintdef(c.oid)
        FROM pg_constraint c JOIN pg_class t ON t.oid = c.conrelid JOIN pg_namespace n ON n.oid = t.relnamespace
        WHERE n.nspname = :schema""",
    ),
    "mysql": (
        "SELECT table_name, column_name, column_type, is_nullable FROM information_schema.columns"
        " WHERE table_schema = :schema",
        "SELECT table_name, index_name, column_name, seq_in_index, non_unique FROM information_schema.statistics"
        " WHERE table_schema = :schema",
        "SELECT table_name, constraint_name, constraint_type FROM information_schema.table_constraints"
        " WHERE table_schema = :schema",
    ),
}
_CURRENT = {"postgresql": "SELECT current_schema()", "mysql": "SELECT database()"}


@dataclass
class StoreSchema:
    """A schema that a test's store may use; None is that of the connection."""

    schema: str | None
    has_tables: bool


class TablePool(ABC):
    """Lends schemas of one database to tests."""

    @abstractmethod
    def take_empty(self) -> StoreSchema:
        """Return one without tables."""

    @abstractmethod
    def take(self, conn_id: str) -> StoreSchema:
        """Return one with the tables of a store, without rows; the connection leads to it."""

    @abstractmethod
    def give_back(self, lent: StoreSchema) -> None:
        """Take it back from a test."""


class FilePool(TablePool):
    """A SQLite file in a test's own folder; with tables it is a copy of the first."""

    _template: ClassVar[bytes | None] = None

    def __init__(self, path: Path) -> None:
        self.path = path

    def take_empty(self) -> StoreSchema:
        return StoreSchema(None, has_tables=False)

    def take(self, conn_id: str) -> StoreSchema:
        if FilePool._template is None:
            with closing(DelayedStoreHook(conn_id)) as hook:
                hook.install([])
            FilePool._template = self.path.read_bytes()
        self.path.write_bytes(FilePool._template)
        return StoreSchema(None, has_tables=True)

    def give_back(self, lent: StoreSchema) -> None:
        pass


def store_file(path: Path) -> tuple[Engine, Tables]:
    """Return a new SQLite file with the tables of a store, without Airflow; the tables are made once."""
    engine = prepare(create_engine(f"sqlite:///{path}", **engine_options("sqlite")))
    path.write_bytes(_bare_tables())
    return engine, store_tables()


@cache
def _bare_tables() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "store.db")
        engine = prepare(create_engine(f"sqlite:///{path}", **engine_options("sqlite")))
        with engine.begin() as connection:
            for table in store_tables():
                table.create(connection)
        engine.dispose()
        return path.read_bytes()


class ServerPool(TablePool):
    """Schemas of a server, of which a process keeps one that has tables; or whole databases, for a page of its own."""

    _made: ClassVar[dict[tuple[str, bool], ServerPool]] = {}

    def __init__(self, url: str, *, databases: bool) -> None:
        self._url = url
        self._databases = databases
        self._server = _engine(url, isolation_level="AUTOCOMMIT")
        self._kept: _Kept | None = None

    @classmethod
    def of(cls, url: str, config: pytest.Config, *, databases: bool = False) -> ServerPool:
        """Return those of this process."""
        key = url, databases
        if key not in cls._made:
            cls._made[key] = cls(url, databases=databases)
            config.add_cleanup(lambda: cls._made.pop(key).close())
        return cls._made[key]

    def close(self) -> None:
        """Leave nothing on a server of the user's own; a private one has ended, with all that it had."""
        if self._url in map(os.environ.get, SERVERS.values()):
            self._forget()
        elif self._kept is not None:
            self._kept.engine.dispose()
        self._server.dispose()

    def take_empty(self) -> StoreSchema:
        return StoreSchema(self._create(), has_tables=False)

    def take(self, conn_id: str) -> StoreSchema:
        kept = self._keep()
        if not kept.shape:
            with closing(DelayedStoreHook(conn_id, schema=kept.lent.schema)) as hook:
                hook.install([])
            kept.shape = kept.look()
        return kept.lent

    def database_url(self) -> str:
        """Return the URL of the database whose tables a test is given."""
        return _beside(self._url, self._keep().name)

    def give_back(self, lent: StoreSchema) -> None:
        if not lent.has_tables:
            self._drop(lent.schema)
        elif not self._keep().emptied():
            self._forget()

    def _keep(self) -> _Kept:
        if self._kept is None:
            name = self._create()
            url = _beside(self._url, name) if self._databases else self._url
            self._kept = _Kept(name, _engine(url), StoreSchema(None if self._databases else name, has_tables=True))
        return self._kept

    def _forget(self) -> None:
        if self._kept is not None:
            kept, self._kept = self._kept, None
            kept.engine.dispose()
            self._drop(kept.name)

    def _create(self) -> str:
        number = uuid4().hex[:8]
        name = f"page_{number}" if self._databases else f'Schema "{number}" of tests'
        self._run(f"CREATE {self._kind} {self._quoted(name)}")
        return name

    def _drop(self, name: str) -> None:
        # on MySQL and MariaDB a schema is a whole database, and there are no such words
        words = {"SCHEMA": " CASCADE", "DATABASE": " WITH (FORCE)"}[self._kind]
        self._run(f"DROP {self._kind} {self._quoted(name)}{words if self._is_postgres else ''}")

    @property
    def _kind(self) -> str:
        return "DATABASE" if self._databases else "SCHEMA"

    @property
    def _is_postgres(self) -> bool:
        return self._server.dialect.name == "postgresql"

    def _quoted(self, name: str) -> str:
        return self._server.dialect.identifier_preparer.quote_identifier(name)

    def _run(self, statement: str) -> None:
        with self._server.connect() as connection:
            connection.execute(text(statement))


@dataclass
class _Kept:
    """A schema or a database with tables, and what they looked like when they were made."""

    name: str
    engine: Engine
    lent: StoreSchema
    shape: list[tuple[Any, ...]] = field(default_factory=list)

    def look(self) -> list[tuple[Any, ...]]:
        with self.engine.connect() as connection:
            return self._look(connection)

    def emptied(self) -> bool:
        """Drop what a test has added and delete its rows; return whether the tables are as they were made."""
        schema = self.lent.schema
        ours = {row[0] for row in self.shape}
        with self.engine.begin() as connection:
            shape = self._look(connection)
            for name in {row[0] for row in shape} - ours:
                Table(name, MetaData(), schema=schema, quote=True, quote_schema=True).drop(connection)
            if [row for row in shape if row[0] in ours] != self.shape:
                return False
            tables = store_tables(schema=schema)
            recorded = select(tables.version.c.Version)
            if connection.execute(recorded).all() != [(VERSION,)]:
                return False
            for table in tables:
                if table is not tables.version:
                    connection.execute(delete(table))
        return True

    def _look(self, connection: Connection) -> list[tuple[Any, ...]]:
        dialect = connection.dialect.name
        schema = self.lent.schema or connection.execute(text(_CURRENT[dialect])).scalar_one()
        found = [connection.execute(text(question), {"schema": schema}).all() for question in _SHAPES[dialect]]
        return sorted((tuple(row) for rows in found for row in rows), key=repr)


def _beside(url: str, database: str) -> str:
    return urlsplit(url)._replace(path=f"/{database}").geturl()


def _engine(url: str, **options: Any) -> Engine:
    return create_engine(re.sub(r"^postgres(ql)?://", "postgresql+psycopg://", url), pool_pre_ping=True, **options)
