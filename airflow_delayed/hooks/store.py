"""The SQL store on any SQL connection that Airflow has."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from threading import Thread
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow.providers.common.sql.hooks.sql import DbApiHook
from airflow.sdk import BaseHook

import airflow_delayed.store.alchemy  # noqa: F401
from airflow_delayed import metrics
from airflow_delayed.compat import limits
from airflow_delayed.delivery import Clock, Delivery, TopologyReport
from airflow_delayed.errors import DelayedError, UnsupportedConnection
from airflow_delayed.hooks.store_operations import StoreOperations
from airflow_delayed.message import utcnow
from airflow_delayed.origin import Origin
from airflow_delayed.store.adopt import Adopter, AdoptReport
from airflow_delayed.store.conflicts import OnConflict
from airflow_delayed.store.dispatch import Dispatcher
from airflow_delayed.store.engine import database_errors, engine_options, first_line, prepare
from airflow_delayed.store.foreign import HeaderFormat, Reader, foreign_table, queue_of
from airflow_delayed.store.schema import TABLE, Tables
from airflow_delayed.store.server import server_name
from airflow_delayed.store.versions import VERSION, check_ready

if TYPE_CHECKING:
    from sqlalchemy import Engine


#: Seconds to wait for an answer. Not every driver has a limit of its own, so the question has a thread.
TEST_SECONDS = 5.0


class DelayedStoreHook(StoreOperations, BaseHook):
    """Keeps messages in a table until a dispatcher hands them over, see StoreDispatchOperator.

    It works through the hook that the connection already has, on PostgreSQL, SQLite, MariaDB 10.6, MySQL 8.0.17 and
    SQL Server, or newer. It has been run on PostgreSQL 15 and 18, MariaDB 10.11 and 11.8, MySQL 9.7 and SQLite; not on
    MySQL 8 and SQL Server. A connection of type mysql may name its driver in the extra ``client`` (mysqlclient,
    mysql-connector-python, pymysql), and a schema is a database there.

    :param conn_id: a SQL connection.
    :param deliver_conn_id: the connection that delivers in the end. Without it, or if it is ``conn_id``, each
        destination is a queue table in the same database.
    :param table: the table's name, at most 50 bytes.
    :param schema: the schema of the table and of queue tables; by default the connection's own.
    :param on_conflict: what ``send`` does with an id that is known with other content, or for another connection:
        "error" stores nothing; "keep" leaves the old one as it is; "replace" changes due time, content, destination
        and delivering connection in one step, also of a message that has failed, unless it is being handed over, was
        handed over or was cancelled.
    :param origin: the run of a task that ``send`` stores for; its messages are found by it.
    :param clock: for the interface's sake. The store goes by the database's clock alone.
    """

    def __init__(
        self,
        conn_id: str,
        deliver_conn_id: str | None = None,
        *,
        table: str = TABLE,
        schema: str | None = None,
        on_conflict: OnConflict = "error",
        origin: Origin | None = None,
        clock: Clock = utcnow,
    ) -> None:
        super().__init__(
            conn_id,
            self._make_engine,
            deliver_conn_id,
            table=table,
            schema=schema,
            on_conflict=on_conflict,
            origin=origin,
        )

    def verify(self, destinations: Iterable[str], *, max_delay: timedelta | None = None) -> TopologyReport:
        """Compare as the store does, and tell what this version of Airflow lacks."""
        return TopologyReport((*super().verify(destinations, max_delay=max_delay).findings, *limits()))

    def dispatcher(
        self,
        deliver_conn_ids: Sequence[str],
        transports: Callable[[str, Clock], Delivery],
        **policy: Any,
    ) -> Dispatcher:
        """Return a dispatcher of this store.

        :param policy: the parameters of :class:`airflow_delayed.store.policy.DispatchPolicy`. What it does is counted
            by Airflow's Stats.
        :raises TopologyError: its tables are missing, or those of another release.
        """
        # what cannot be is told before anything is asked of the database
        made = Dispatcher(
            self.engine,
            self.tables,
            conn_id=self.conn_id,
            transports=transports,
            deliver_conn_ids=deliver_conn_ids,
            schema=self.schema,
            meter=metrics.count_verdicts(self.conn_id),
            **policy,
        )
        with database_errors(self.conn_id, self.engine, self.tables):
            self._check_version()
        return made

    def adopt(
        self,
        *,
        table: str,
        schema: str | None = None,
        columns: Mapping[str, str] | None = None,
        headers: HeaderFormat = "xml",
        destination_of: Callable[[str], str] = queue_of,
        batch_size: int = 500,
        dry_run: bool = False,
    ) -> AdoptReport:
        """Move what waits in another store's table of this database into this store, for its ``deliver_conn_id``.

        The table has the shape of NServiceBus's SqlServerDelayedMessageStore, or other names. Its ids, due times (read
        as UTC) and counts of failures are kept. The other store may go on at the same time: what it holds is passed
        over. Nothing is lost if this is killed: run it again. Run it again too for ``remaining`` rows.

        :param table: its name, as the database writes it; NServiceBus's default is ``<endpoint>.timeouts``.
        :param schema: its schema, such as ``dbo``; by default the connection's own.
        :param columns: names that are not NServiceBus's, by those that are: ``{"Id": "message_id", "State": "body"}``.
        :param headers: ``xml``, as NServiceBus's MSMQ transport writes them, or ``json``, one object.
        :param destination_of: makes the destination of what the row has. By default the machine of an MSMQ address is
            left out: ``Sales@SERVER1`` is ``Sales``.
        :param batch_size: rows that are locked and copied at a time, 1 to 1000.
        :param dry_run: change nothing, and report what would be.
        :raises ValueError: the hook's ``on_conflict`` is not ``error``, or another of these cannot be.
        :raises SourceError: the table is not there, is one of this package, or its ids need not be unique.
        :raises UnsupportedColumns: the table lacks a column; the text names it.
        :raises TopologyError: this store's own tables are missing.
        :raises TransportUnavailable: the database cannot be reached; what was taken over before is so.
        """
        if self.on_conflict != "error":
            raise ValueError(
                f"on_conflict={self.on_conflict!r}: a row of an id that is here with other content is left where it is;"
                " take over with a hook of on_conflict='error'"
            )
        reader = Reader(headers, destination_of)
        with database_errors(self.conn_id, self.engine, self.tables):
            source = foreign_table(self.engine, table, schema=schema, columns=columns)
            adopter = Adopter(self.engine, source, self.tables.messages, self, reader, batch_size)
            return adopter.plan() if dry_run else adopter.run()

    def test_connection(self) -> tuple[bool, str]:
        """Connect, and look for the store's tables; return whether all is well, and what to show.

        It takes 5 seconds at most. The text is what answered, or what is wrong and what to do, without the password.
        Airflow's UI does not call it: the button of a SQL connection is that connection's own.
        """
        try:
            return True, _within(TEST_SECONDS, self.conn_id, _look, self.engine, self.conn_id, self.tables)
        except DelayedError as error:
            # a driver's words, or ours
            said = str(error)
        except Exception as error:
            # no such connection, no driver for it, or arguments that the driver does not know
            said = f"connection {self.conn_id!r} cannot be used: {type(error).__name__}: {first_line(error)}"
        return False, _without_password(self, said)

    def _make_engine(self) -> Engine:
        hook = self.get_connection(self.conn_id).get_hook()
        if not isinstance(hook, DbApiHook):
            kind = self.get_connection(self.conn_id).conn_type
            raise UnsupportedConnection(self.conn_id, kind, ["sqlite", "postgres", "mysql", "mssql"])
        options = engine_options(hook.dialect_name)
        # the engine of Airflow's hook passes on none of the connection's extras, sslmode among them; its own
        # connections get all that are not on this list, and nothing without it
        if hasattr(hook, "ignored_extra_options"):
            extras = {
                key: value for key, value in hook.connection_extra.items() if key not in hook.ignored_extra_options
            }
            options["connect_args"] = {**options.get("connect_args", {}), **extras}
        return prepare(hook.get_sqlalchemy_engine(engine_kwargs=options))


def _look(engine: Engine, conn_id: str, tables: Tables) -> str:
    with database_errors(conn_id, engine):
        with engine.connect().execution_options(read_only=True) as connection:
            name = server_name(connection)
        check_ready(conn_id, engine, tables)
    return f"Connected to {name}; the tables are of version {VERSION}"


def _within(seconds: float, conn_id: str, work: Callable[..., str], *arguments: object) -> str:
    """Return what the work returns, or raise what it raises.

    :raises DelayedError: it takes longer; it goes on nevertheless, and keeps nobody from ending.
    """
    found: list[str] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            found.append(work(*arguments))
        except Exception as error:
            errors.append(error)

    thread = Thread(target=contextvars.copy_context().run, args=(run,), name="delayed-test", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not found:
        raise DelayedError(
            f"connection {conn_id!r} did not answer within {seconds:g} seconds; look whether host and port are right,"
            " and whether a firewall is in between"
        )
    return found[0]


def _without_password(store: DelayedStoreHook, said: str) -> str:
    try:
        password = store.get_connection(store.conn_id).password
    except Exception:
        # there is no such connection, and no password
        return said
    for secret in {password, quote(password, safe="")} if password else ():
        said = said.replace(secret, "***")
    return said
