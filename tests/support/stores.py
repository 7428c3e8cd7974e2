"""A store on SQLite, PostgreSQL and MariaDB, and a transport whose faults a test chooses.

Which databases a test runs on:

- where SQL differs it takes the fixture of ``store_fixture``: each database in every run.
- above SQL it is in a folder whose conftest.py imports ``plain_store_fixture``: SQLite, and each database in a long
  run. One test of such a file is marked ``on_postgres_too``.

Tables are made once in each process. A test that begins with ``store.installed()`` is given those, and they are
emptied after it; a test that asks for a hook or the schema first has a schema without tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from uuid import uuid4

import pytest
from airflow.sdk import BaseHook
from sqlalchemy import URL, Row, create_engine, select, text

from airflow_delayed.delivery import SendReport, TopologyReport
from airflow_delayed.errors import DestinationMissing, LimitExceeded, SendFailed, TransportUnavailable
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.message import DelayedMessage, utcnow
from airflow_delayed.store.dispatch.dispatcher import Dispatcher
from support import sleeping
from support.lengths import LONG
from support.table_pools import FilePool, ServerPool, StoreSchema, TablePool

DATABASES = ["sqlite", "postgres", "mariadb"]
#: For the one test of a file above SQL that a short run plays on a server too.
on_postgres_too = pytest.mark.parametrize("store", DATABASES if LONG else ["sqlite", "postgres"], indirect=True)
#: For a test whose work is the same on each database, and costly.
on_postgres_only = pytest.mark.parametrize("store", DATABASES if LONG else ["postgres"], indirect=True)


def choose_driver(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let Airflow's hook of PostgreSQL use psycopg, or psycopg2 as where psycopg is not installed."""
    monkeypatch.setattr("airflow.providers.postgres.hooks.postgres.USE_PSYCOPG3", name == "psycopg")


class Store:
    """Makes hooks on one database, for messages that the connection ``broker`` delivers unless told otherwise.

    :param pool: where its tables are, in place of a schema.
    """

    def __init__(self, conn_id: str, schema: str | None = None, *, pool: TablePool | None = None) -> None:
        self.conn_id = conn_id
        self.hooks: list[DelayedStoreHook] = []
        self._dispatchers: list[Dispatcher] = []
        self._schema = schema
        self._pool = pool
        self._lent: StoreSchema | None = None

    @property
    def schema(self) -> str | None:
        """Where its tables are, or will be; who asks before ``installed()`` has one without tables."""
        if self._pool is None:
            return self._schema
        if self._lent is None:
            self._lent = self._pool.take_empty()
        return self._lent.schema

    def hook(self, deliver_conn_id: str | None = "broker", **options: object) -> DelayedStoreHook:
        made = DelayedStoreHook(self.conn_id, deliver_conn_id, schema=self.schema, **options)
        self.hooks.append(made)
        return made

    def installed(self, *queues: str, deliver_conn_id: str | None = "broker") -> DelayedStoreHook:
        """A hook with its table, and these queue tables."""
        if self._pool is not None and self._lent is None:
            self._lent = self._pool.take(self.conn_id)
        if queues or self._lent is None or not self._lent.has_tables:
            self.hook(None).install(queues, create_destinations=True)
        return self.hook(deliver_conn_id)

    def url(self) -> URL:
        """Its address with the login, for an engine that asks no Airflow connection."""
        login = BaseHook.get_connection(self.conn_id)
        return self.hook().engine.url.set(username=login.login, password=login.password)

    def close(self) -> None:
        """Close its dispatchers and hooks, and leave its tables to the next test."""
        for dispatcher in self._dispatchers:
            # one of which a test called only once() would write its next heartbeat into the tables of another test
            dispatcher.close()
        for hook in self.hooks:
            hook.close()
        sleeping.stop()
        if self._pool is not None and self._lent is not None:
            self._pool.give_back(self._lent)

    def dispatcher(self, hook: DelayedStoreHook, transport: Transport | None = None, **options: object) -> Dispatcher:
        def transports(conn_id: str, clock: Callable[[], datetime]) -> Transport:
            transport.clock = clock
            return transport

        arguments = {
            "deliver_conn_ids": ["broker"] if transport else [hook.conn_id],
            "lookahead": timedelta(0),
            "schema": self.schema,
            "transports": transports,
            # what fails is not waited for
            "time_to_trigger_store_circuit_breaker": timedelta(0),
            "time_to_trigger_fetch_circuit_breaker": timedelta(0),
            "time_to_trigger_dispatch_circuit_breaker": timedelta(0),
            **options,
        }
        made = Dispatcher(hook.engine, hook.tables, conn_id=hook.conn_id, **arguments)
        self._dispatchers.append(made)
        return made

    def rows(self, hook: DelayedStoreHook, queue: str) -> list[tuple[str, bytes]]:
        """Headers and bodies of a queue table, in order."""
        found = self.sql(hook, f'SELECT headers, body FROM {{s}}"{queue}" ORDER BY seq')
        return [(row.headers, bytes(row.body)) for row in found]

    def sql(self, hook: DelayedStoreHook, statement: str) -> Sequence[Row]:
        """Run SQL, and return its rows. ``{s}`` is the schema with its dot; names are in double quotes everywhere."""
        with hook.engine.begin() as connection:
            mysql = connection.dialect.name == "mysql"
            if mysql:
                connection.execute(text("SET sql_mode = CONCAT(@@sql_mode, ',ANSI_QUOTES')"))
            done = connection.execute(
                text(statement.replace("{s}", f"{quoted(self.schema)}." if self.schema else "").replace(":", r"\:"))
            )
            rows = done.all() if done.returns_rows else []
            if mysql:
                # as it was: what SQLAlchemy reads of tables would be quoted otherwise too
                connection.execute(text("SET sql_mode = REPLACE(@@sql_mode, 'ANSI_QUOTES', '')"))
            return rows

    def failures_of(self, hook: DelayedStoreHook) -> dict[str, int]:
        return {one.message_id: one.retry_count for one in hook.list() if one.state not in ("failed", "expired")}

    def given_up(self, hook: DelayedStoreHook) -> dict[str, tuple[str, int, str | None]]:
        """Reason, failures and last error by id of what is in the table of failed messages."""
        failed = hook.tables.failed
        with hook.engine.connect() as connection:
            found = connection.execute(select(failed.c.Id, failed.c.Reason, failed.c.RetryCount, failed.c.LastError))
            return {row.Id: (row.Reason, row.RetryCount, row.LastError) for row in found}

    def leased(self, hook: DelayedStoreHook) -> set[str]:
        """Ids of messages that a dispatcher holds."""
        past, messages = hook.tables.past, hook.tables.messages
        with hook.engine.connect() as connection:
            return set(
                connection.execute(
                    select(messages.c.Id).join_from(messages, past, past.c.Id == messages.c.Id)
                ).scalars()
            )

    def past(self, hook: DelayedStoreHook) -> dict[str, str]:
        """Outcome by id of what is remembered."""
        past = hook.tables.past
        with hook.engine.connect() as connection:
            return {row.Id: row.Outcome for row in connection.execute(select(past.c.Id, past.c.Outcome))}


@pytest.fixture(name="store", params=DATABASES)
def store_fixture(request, connect, tmp_path) -> Iterator[Store]:
    yield from _store(request, connect, tmp_path)


@pytest.fixture(name="store", params=DATABASES if LONG else ["sqlite"])
def plain_store_fixture(request, connect, tmp_path) -> Iterator[Store]:
    yield from _store(request, connect, tmp_path)


def _store(request: pytest.FixtureRequest, connect: Callable[..., str], folder: Path) -> Iterator[Store]:
    conn_id = f"store_{uuid4().hex[:8]}"
    if request.param == "sqlite":
        pool: TablePool = FilePool(folder / "store.db")
        connect(conn_id, conn_type="sqlite", host=str(folder / "store.db"))
    else:
        url = request.getfixturevalue(f"{request.param}_url")
        pool = ServerPool.of(url, request.config)
        connect(conn_id, url)
    store = Store(conn_id, pool=pool)
    yield store
    store.close()


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def run_sql(url: str, *statements: str) -> None:
    engine = create_engine(
        url.replace("postgresql://", "postgresql+psycopg://").replace("postgres://", "postgresql+psycopg://")
    )
    with closing(engine.raw_connection()) as connection:
        if engine.dialect.name == "mysql":
            connection.cursor().execute("SET sql_mode = CONCAT(@@sql_mode, ',ANSI_QUOTES')")
        for statement in statements:
            connection.cursor().execute(statement)
        connection.commit()
    engine.dispose()


def message(name: str, due_at: datetime, **fields: object) -> DelayedMessage:
    return DelayedMessage(
        **{"destination": "q", "body": b"body of " + name.encode(), "due_at": due_at, "message_id": name, **fields}
    )


@dataclass
class Transport:
    """Takes messages as a broker would, in windows, with the faults that a test wants.

    ``missing`` destinations end a send as RabbitMQ's do: what was taken before is confirmed, nothing is taken after.
    """

    horizon: timedelta = timedelta(days=365)
    clock: Callable[[], datetime] = utcnow
    sent: list[DelayedMessage] = field(default_factory=list)
    delays: dict[str, timedelta] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    too_long: set[str] = field(default_factory=set)
    #: The connection is lost after so many messages of each send.
    lost_after: int | None = None
    #: A lost connection is told by SendFailed, which counts what was confirmed.
    counts_when_lost: bool = False
    silent: bool = False
    closed: int = 0
    sooner_when_due: bool = False

    @property
    def ids(self) -> list[str]:
        return [one.message_id for one in self.sent]

    def check(self, one: DelayedMessage, now: datetime) -> None:
        if one.message_id in self.too_long:
            raise LimitExceeded("body", "has too many bytes")

    def send(self, messages) -> SendReport:
        report = SendReport()
        failures = []
        for index, one in enumerate(messages):
            if index == self.lost_after:
                self._lose(report, one)
            if one.destination in self.missing:
                gone = DestinationMissing("broker", [one.destination], "make it")
                if not report.sent:
                    raise gone
                raise SendFailed("broker", report, [(one.message_id, str(gone))]) from gone
            if one.message_id in self.refused:
                failures.append((one.message_id, "refused"))
                continue
            self.sent.append(one)
            self.delays[one.message_id] = one.due_at - self.clock()
            report.add(one)
        if failures:
            raise SendFailed("broker", SendReport() if self.silent else report, failures)
        return report

    def _lose(self, report: SendReport, one: DelayedMessage) -> None:
        lost = TransportUnavailable("connection 'broker': reset by peer")
        if self.counts_when_lost and report.sent:
            raise SendFailed("broker", report, [(one.message_id, "not confirmed")]) from lost
        raise lost

    def install(self, destinations, *, create_destinations=False, dry_run=False) -> TopologyReport:
        raise NotImplementedError

    def verify(self, destinations, *, max_delay=None) -> TopologyReport:
        raise NotImplementedError

    def close(self) -> None:
        self.closed += 1
