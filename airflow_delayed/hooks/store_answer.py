"""Whether a store answers and is ready: a part of DelayedStoreHook."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

from airflow_delayed.errors import DelayedError
from airflow_delayed.store.engine import database_errors, first_line
from airflow_delayed.store.server import server_name
from airflow_delayed.store.versions import VERSION, check_ready

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from airflow_delayed.store.schema import Tables

#: Seconds to wait for an answer. Not every driver has a limit of its own, so the question has a thread.
TEST_SECONDS = 5.0


class _Store(Protocol):
    conn_id: str
    tables: Tables

    @property
    def engine(self) -> Engine: ...

    def get_connection(self, conn_id: str, /) -> Any: ...


class StoreAnswer:
    """What the hook of a store tells of its connection."""

    def test_connection(self: _Store) -> tuple[bool, str]:
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


def _without_password(store: _Store, said: str) -> str:
    try:
        password = store.get_connection(store.conn_id).password
    except Exception:
        # there is no such connection, and no password
        return said
    for secret in {password, quote(password, safe="")} if password else ():
        said = said.replace(secret, "***")
    return said
