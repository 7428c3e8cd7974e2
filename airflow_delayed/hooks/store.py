"""The SQL store on any SQL connection that Airflow has."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from airflow.providers.common.sql.hooks.sql import DbApiHook
from airflow.sdk import BaseHook, Connection
from sqlalchemy import URL, create_engine, event
from sqlalchemy.exc import OperationalError

from airflow_delayed import config, metrics
from airflow_delayed.compat import AirflowException, conf, extra_of, limits
from airflow_delayed.delivery import BUILT_IN, Clock, Delivery, TopologyReport
from airflow_delayed.errors import DelayedError, MissingExtra, NotAStore, UnsupportedConnection
from airflow_delayed.identity import Origin
from airflow_delayed.message import utcnow
from airflow_delayed.store.api import Store, dialect_named, first_line, prepare, system_user
from airflow_delayed.store.policy import OnConflict
from airflow_delayed.store.schema import TABLE
from airflow_delayed.threads import in_thread

if TYPE_CHECKING:
    from sqlalchemy import Dialect, Engine

    from airflow_delayed.store.dispatch.dispatcher import Dispatcher

T = TypeVar("T")

#: Seconds to wait for an answer. Not every driver has a limit of its own, so the question has a thread.
TEST_SECONDS = 5.0
#: The executors whose workers are processes of the scheduler's machine.
LOCAL_EXECUTORS = ("LocalExecutor", "SequentialExecutor", "DebugExecutor")


class DelayedStoreHook(Store, BaseHook):
    """Keeps messages in a table until they are dispatched, see StoreDispatchOperator.

    It works through the hook that the connection already has, on PostgreSQL, SQLite, MariaDB 10.6 and MySQL 8.0.17, or
    newer. It has been run on PostgreSQL 15 and 18, MariaDB 10.11 and 11.8, MySQL 9.7 and SQLite; not on MySQL 8. A
    connection of type mysql may name its driver in the extra ``client`` (mysqlclient, mysql-connector-python), and a
    schema is a database there. Each connection to a server is made by ``get_conn()`` of that hook, from what Airflow
    has for it then: TLS, IAM and a changed password are as everywhere in Airflow.

    What it does beside sending is in :class:`airflow_delayed.store.api.Store`.

    :param conn_id: a SQL connection.
    :param deliver_conn_id: the connection that delivers in the end. Without it, or if it is ``conn_id``, each
        destination is a queue table in the same database.
    :param table: the table's name, at most 50 bytes.
    :param schema: the schema of the table and of queue tables; by default the connection's own.
    :param on_conflict: what ``send`` does with an id that is known with other content, or for another connection:
        "error" stores nothing; "keep" leaves the old one as it is; "replace" changes due time, content, destination
        and delivering connection in one step, also of a message that has failed, unless it is being dispatched, was
        dispatched or was cancelled.
    :param origin: the run of a task that ``send`` stores for; its messages are found by it.
    :param until_due: messages that ``send`` stores stay here until they are due, whatever the lookahead of a
        dispatcher is, and can be cancelled until then. They arrive late by the time between two dispatches.
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
        until_due: bool = False,
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
            until_due=until_due,
        )

    def get_conn(self) -> Any:
        """Return a new DB-API connection, as Airflow's own hook of this connection does; close it after use.

        The store itself uses others. For SQLAlchemy there is ``engine``.

        :raises UnsupportedConnection: the connection is of no SQL database.
        """
        return self._sql_hook().get_conn()

    def gauges(self, *, quick: bool = False) -> None:
        """Emit the counts as gauges through Airflow's Stats.

        ``delayed.store.waiting``, ``.due``, ``.overdue`` (by 10 s), ``.in_flight``, ``.retrying``, ``.failed``,
        ``.expired`` and ``.remembered``, each with the tag ``store_conn_id``, and ``table`` for another table than the
        default; ``delayed.store.oldest_due_seconds`` is how long the oldest has been due. Reads what :meth:`counts`
        reads.

        :param quick: emit ``oldest_due_seconds`` alone, which one row tells, however many messages are due.
        """
        tags = {"store_conn_id": self.conn_id}
        if self.table.fullname != TABLE:
            # another store on the same connection
            tags["table"] = self.table.fullname
        numbers = {} if quick else self.counts(hours=0).numbers()
        for name, value in {**numbers, "oldest_due_seconds": self.oldest_due_seconds()}.items():
            metrics.gauge(f"store.{name}", value, tags)

    def verify(self, destinations: Iterable[str], *, max_delay: timedelta | None = None) -> TopologyReport:
        """Compare as the store does; also report the features that this version of Airflow lacks."""
        return TopologyReport((*super().verify(destinations, max_delay=max_delay).findings, *limits()))

    def dispatcher(
        self,
        deliver_conn_ids: Sequence[str],
        transports: Callable[[str, Clock], Delivery],
        **policy: Any,
    ) -> Dispatcher:
        """Return a dispatcher whose outcomes Airflow's Stats counts, see :meth:`Store.dispatcher`."""
        task = _current_task()
        more: dict[str, Any] = {"dag_id": task and task["ti"].dag_id, "meter": metrics.count_outcomes(self.conn_id)}
        return super().dispatcher(deliver_conn_ids, transports, **{**more, **policy})

    def cancel_grace(self) -> timedelta:
        """Return how long a cancel can be taken back: ``[delayed] cancel_grace``."""
        return config.cancel_grace()

    def actor(self) -> str:
        """Return the task that works here, with the user who triggered its run; elsewhere, the system's user."""
        return acting()

    def test_connection(self) -> tuple[bool, str]:
        """Connect within 5 seconds, and look for the tables; return whether all is well, and the text to show."""
        try:
            answer = in_thread(self.describe_server)
            wait([answer], TEST_SECONDS)
            return True, result_of(answer, TEST_SECONDS, self.conn_id)
        except DelayedError as error:
            # a driver's words, or ours
            text = str(error)
        except Exception as error:
            # no such connection, no driver for it, or arguments that the driver does not know
            text = f"connection {self.conn_id!r} cannot be used: {type(error).__name__}: {first_line(error)}"
        return False, _without_password(self, text)

    def database(self) -> str:
        """Return SQLAlchemy's name of the database, without connecting to it; ``mysql`` stands for MariaDB too.

        :raises UnsupportedConnection: the connection is of no SQL database.
        """
        return database_of(self._sql_hook())

    def _sql_hook(self) -> DbApiHook:
        connection = self.get_connection(self.conn_id)
        kind = connection.conn_type
        if BUILT_IN.get(kind or "", BUILT_IN["sqlite"]) != BUILT_IN["sqlite"]:
            raise NotAStore(self.conn_id, kind)
        hook = hook_of(connection)
        if not isinstance(hook, DbApiHook):
            raise UnsupportedConnection(self.conn_id, kind, ["sqlite", "postgres", "mysql"])
        return hook

    def _make_engine(self) -> Engine:
        hook = self._sql_hook()
        dialect = dialect_named(database_of(hook))
        if dialect.is_file:
            check_shared_disk(self.conn_id)
        return prepare(engine_by(hook, **dialect.engine_options()))


def hook_of(connection: Connection) -> BaseHook | None:
    """Return Airflow's hook of a connection; None: no provider has a hook for its type."""
    try:
        hook: BaseHook = connection.get_hook()
    except AirflowException as error:
        if "Unknown hook type" not in str(error):
            raise
        kind = connection.conn_type
        if kind and kind in BUILT_IN:
            what = f"connection {connection.conn_id!r}: type {kind!r}"
            raise MissingExtra(what, "its provider", kind) from None
        return None
    return hook


#: SQLAlchemy's name of the database, by the types of connections whose sessions Airflow's hook opens for an engine.
_SERVERS = {"postgres": "postgresql", "mysql": "mysql"}
#: Extras that do not reach the driver: an engine has cursors of its own, and the character set of all texts.
_NOT_FOR_ENGINES = ("cursor", "charset", "client_encoding")
#: What an engine's URL has, and the connection that Airflow returns may have otherwise by now.
_OF_THE_URL = ("host", "port", "dbname", "db", "database", "context")
#: Extras for the drivers of MySQL that Airflow's hook leaves out.
_MYSQL_EXTRAS = ("connect_timeout", "connection_timeout", "read_timeout", "write_timeout")
#: Where that hook makes the arguments of each driver.
_MYSQL_ARGUMENTS = ("_get_conn_config_mysql_client", "_get_conn_config_mysql_connector_python")


def database_of(hook: DbApiHook) -> str:
    """Return SQLAlchemy's name of the hook's database."""
    # a hook's own attribute parses a URL, and MySQL's has no brackets around an address such as ::1
    return _SERVERS.get(hook.conn_type) or hook.dialect_name


def engine_by(hook: DbApiHook, **options: Any) -> Engine:
    """Return an engine whose connections Airflow's hook makes, each from what Airflow has for the connection then.

    On another server than PostgreSQL, MySQL and MariaDB, it is the hook's own engine.

    :param options: for SQLAlchemy's ``create_engine``.
    """
    if hook.conn_type not in _SERVERS:
        return hook.get_sqlalchemy_engine(engine_kwargs=options)
    options["connect_args"] = dialect_named(database_of(hook)).engine_options()["connect_args"]
    connection = hook.connection
    extra = extra_of(connection)
    port = str(extra.get("port") or connection.port or "").partition(",")[0]
    url = URL.create(
        _driver(connection, extra),
        host=connection.host,
        port=int(port) if port else None,
        database=connection.schema,
    )
    engine = create_engine(url, **options)
    event.listen(engine, "do_connect", partial(_connect, hook.get_conn_id()))
    return engine


def _driver(connection: Connection, extra: Mapping[str, Any]) -> str:
    if connection.conn_type == "mysql":
        return dialect_named("mysql").client(connection.conn_id, extra).dialect
    from airflow.providers.postgres.hooks import postgres

    # whatever the extra sqlalchemy_scheme is: the hook chooses by what is installed
    return "postgresql+psycopg" if getattr(postgres, "USE_PSYCOPG3", False) else "postgresql+psycopg2"


def _connect(conn_id: str, dialect: Dialect, record: Any, _arguments: Any, parameters: dict[str, Any]) -> Any:
    """Ask Airflow for the connection, and let its hook connect; the extras get the defaults that they lack."""
    database = dialect_named(dialect.name)
    database.set_limits(dialect, record, parameters)
    try:
        asked = BaseHook.get_connection(conn_id)
        extra = extra_of(asked)
        own = {key: value for key, value in extra.items() if key not in _NOT_FOR_ENGINES}
        if asked.conn_type == "postgres":
            own = {key: value for key, value in parameters.items() if key not in _OF_THE_URL} | own
        copy = Connection(
            conn_id=conn_id,
            conn_type=asked.conn_type,
            host=asked.host,
            port=asked.port,
            login=asked.login,
            password=asked.password,
            schema=asked.schema,
            extra=json.dumps(own),
        )
        hook = copy.get_hook(hook_params={"connection": copy})
        if asked.conn_type == "mysql":
            database.client(conn_id, extra)
            arguments = parameters | {key: extra[key] for key in _MYSQL_EXTRAS if key in extra}
            for name in _MYSQL_ARGUMENTS:
                setattr(hook, name, partial(_with_defaults, arguments, getattr(hook, name)))
        return hook.get_conn()
    except dialect.loaded_dbapi.Error:
        raise
    except Exception as error:
        # as what a driver cannot reach: it is tried again
        raise OperationalError(None, None, error) from error


def _with_defaults(defaults: Mapping[str, Any], made: Callable[[Any], dict[str, Any]], connection: Any) -> Any:
    return {**defaults, **made(connection)}


def check_shared_disk(conn_id: str) -> None:
    """Check that all workers see the same file, where a store is kept in SQLite.

    :raises DelayedError: the executor's workers may run on several machines, and ``[delayed] sqlite_on_shared_disk``
        does not say that they share a disk.
    """
    # a pod of KubernetesExecutor has LocalExecutor in its configuration, as Airflow's Helm chart sets it
    in_pod = ["KubernetesExecutor"] if os.environ.get("AIRFLOW_IS_K8S_EXECUTOR_POD") else []
    # each is a name, a path, or an alias and a colon before one; a team's begins with its name and an equals sign
    names = [part.strip() for part in re.split("[,;]", conf.get("core", "executor", fallback="LocalExecutor"))]
    remote = [name for name in in_pod + names if re.split("[.:=]", name)[-1] not in LOCAL_EXECUTORS]
    if remote and not config.sqlite_on_shared_disk():
        raise DelayedError(
            f"connection {conn_id!r} is a SQLite file, and the workers of {remote[0]} may run on machines that do not"
            " share it: each would have a store of its own, whose messages nobody dispatches. Keep the store in"
            " PostgreSQL or MySQL; or, if all of Airflow's processes see this file on one disk, set"
            " sqlite_on_shared_disk = True in section [delayed] of Airflow's configuration"
            " (AIRFLOW__DELAYED__SQLITE_ON_SHARED_DISK)"
        )


def result_of(answer: Future[T], seconds: float, conn_id: str) -> T:
    """Return what work returned, or raise what it raised; DelayedError: it has not ended, and goes on nevertheless."""
    if not answer.done():
        raise DelayedError(
            f"connection {conn_id!r} did not answer within {seconds:g} seconds; look whether host and port are right,"
            " and whether a firewall is in between"
        )
    return answer.result()


def _without_password(store: DelayedStoreHook, text: str) -> str:
    try:
        password = store.get_connection(store.conn_id).password
    except Exception:
        # there is no such connection, and no password
        return text
    for secret in {password, quote(password, safe="")} if password else ():
        text = text.replace(secret, "***")
    return text


def acting() -> str:
    """Return the actor: the task, with the user who triggered its run; elsewhere the operating system's user."""
    context = _current_task()
    if context is None:
        return system_user()
    task = context["ti"]
    who = f"task {task.dag_id}.{task.task_id}, run {task.run_id}"
    triggered_by = getattr(context.get("dag_run"), "triggering_user_name", None)
    return f"{who}, triggered by {triggered_by}" if triggered_by else who


def _current_task() -> Any:
    from airflow.sdk import get_current_context

    try:
        return get_current_context()
    except RuntimeError:
        return None
