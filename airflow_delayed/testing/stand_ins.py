"""Stand-ins for brokers, databases and clocks while a test has the fixture ``delayed``."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from functools import cached_property, wraps
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow_delayed import clock, delivery
from airflow_delayed.clock import Clock, utcnow
from airflow_delayed.delivery import Delivery, Finding, SendReport, State, TopologyReport
from airflow_delayed.message import EPOCH, DelayedMessage
from airflow_delayed.testing.delayed import ANY, Delayed

if TYPE_CHECKING:
    import pytest

_ANYTHING = "airflow_delayed.testing.stand_ins:AnyTransport"
_STORE = "airflow_delayed.hooks.store:DelayedStoreHook"
#: Seconds: a sleep that never ends early.
_AGES = 1e9
#: Methods by which hooks would reach a broker.
_WAYS_OUT = ("_make_client", "_hosts")


def played(patch: pytest.MonkeyPatch, folder: Path) -> Delayed:
    """Install the stand-ins, and return the object that the fixture passes to a test.

    :param folder: for the stores' files.
    """
    delayed = Delayed(patch)
    patch.setattr(clock, "_present", lambda: delayed.now)
    patch.setattr(clock, "_skip", delayed.advance)
    patch.setitem(delivery.BUILT_IN, ANY, _ANYTHING)
    for module in ("airflow_delayed.delivery", "airflow_delayed.operators.topology"):
        patch.setattr(f"{module}.type_of", delayed.type_of)
    others = [entry.value for entry in entry_points(group="airflow_delayed.delivery")]
    for target in dict.fromkeys([*others, *delivery.BUILT_IN.values()]):
        try:
            hook = getattr(import_module(target.partition(":")[0]), target.partition(":")[2])
        except ImportError:
            # its extra is not installed
            continue
        if target == _STORE:
            _store(delayed, patch, hook, folder)
        else:
            _transport(delayed, patch, hook)
    return delayed


def _transport(delayed: Delayed, patch: pytest.MonkeyPatch, hook: Any) -> None:
    """Note sent messages, and report all queues as existing."""

    def install(self: Any, destinations: Iterable[str], **options: Any) -> TopologyReport:
        return TopologyReport(tuple(Finding(state=State.OK, resource=f"queue {name}") for name in destinations))

    def verify(self: Any, destinations: Iterable[str], **options: Any) -> TopologyReport:
        return TopologyReport()

    def uninstall(self: Any, **options: Any) -> TopologyReport:
        return TopologyReport()

    def send(self: Any, messages: Iterable[DelayedMessage]) -> SendReport:
        report = SendReport()
        for message in messages:
            self.check(message, delayed.now)
            delayed.note(self.conn_id, message)
            report.add(message)
        return report

    def no_broker(self: Any, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError(
            f"there is no broker behind connection {self.conn_id!r} in a test with the fixture `delayed`, which plays"
            " sending, installing and dispatching alone"
        )

    made = hook.__init__

    @wraps(made)
    def init(self: Any, conn_id: str = getattr(hook, "default_conn_name", ""), *arguments: Any, **options: Any) -> None:
        delayed.ensure(conn_id, getattr(hook, "conn_type", ANY))
        made(self, conn_id, *arguments, **options)

    patch.setattr(hook, "__init__", init)
    for name, played in {"install": install, "verify": verify, "uninstall": uninstall, "send": send}.items():
        if hasattr(hook, name):
            # an option that it does not have is an error as ever
            patch.setattr(hook, name, _like(getattr(hook, name), played))
    for name in _WAYS_OUT:
        if hasattr(hook, name):
            patch.setattr(hook, name, no_broker)


def _like(method: Any, played: Any) -> Any:
    return wraps(method)(played)


def _store(delayed: Delayed, patch: pytest.MonkeyPatch, hook: Any, folder: Path) -> None:
    """Let the store's own code work on SQLite, by the test's clock."""
    from airflow_delayed.store.api import Store
    from airflow_delayed.store.dispatch import dispatcher as dispatching
    from airflow_delayed.store.dispatch import loop
    from airflow_delayed.store.dispatch.queue_tables import QueueTables

    conn_ids: dict[str, str] = {}

    def engine(self: Any) -> Any:
        made = _engine(delayed, folder / f"{quote(self.conn_id, safe='')}.db", self.schema)
        conn_ids[str(made.url.database)] = self.conn_id
        Store(self.conn_id, lambda: made, table=self.table.name, schema=self.schema).install(())
        delayed.opened(self)
        return made

    verified = hook.verify

    @wraps(verified)
    def verify(self: Any, destinations: Iterable[str], **options: Any) -> TopologyReport:
        names = list(destinations)
        self.install(names, create_destinations=True)
        report: TopologyReport = verified(self, names, **options)
        return report

    dispatcher = hook.dispatcher

    @wraps(dispatcher)
    def by_the_clock(self: Any, *arguments: Any, **options: Any) -> Any:
        return dispatcher(self, *arguments, monotonic=seconds, sleep=delayed.advance, **options)

    deliver = QueueTables.deliver

    def delivered(self: Any, connection: Any, messages: Any) -> Any:
        failures = deliver(self, connection, messages)
        for message in messages:
            if message.message_id not in failures:
                delayed.note(conn_ids[str(connection.engine.url.database)], message)
        return failures

    def seconds() -> float:
        return (delayed.now - EPOCH).total_seconds()

    shown = cached_property(engine)
    shown.__set_name__(hook, "engine")
    patch.setattr(hook, "engine", shown)
    patch.setattr(hook, "verify", verify)
    patch.setattr(hook, "dispatcher", by_the_clock)
    patch.setattr(QueueTables, "deliver", delivered)
    patch.setattr(dispatching, "POLL", _AGES)
    patch.setattr(loop, "PASS_EVERY", _AGES)


def _engine(delayed: Delayed, path: Path, schema: str | None) -> Any:
    from sqlalchemy import create_engine, event

    from airflow_delayed.store.api import engine_options, prepare

    def prepared(connection: Any, _record: object) -> None:
        # how the store asks SQLite for the time
        connection.create_function("strftime", 2, lambda *_: delayed.now.replace(tzinfo=None).isoformat())
        if schema is not None:
            connection.execute(f'ATTACH DATABASE ? AS "{schema}"', [f"{path}.{quote(schema, safe='')}"])

    made = create_engine(f"sqlite:///{path}", **engine_options("sqlite"))
    event.listen(made, "connect", prepared)
    return prepare(made)


class AnyTransport(Delivery):
    """The transport of a connection that the test does not define: any message, any delay, any option.

    :param conn_id: a connection that need not exist.
    """

    horizon = timedelta(days=36_500)

    def __init__(self, conn_id: str, *, clock: Clock = utcnow, **options: object) -> None:
        self.conn_id = conn_id

    def install(self, destinations: Iterable[str], **options: object) -> TopologyReport:
        """Return an empty report."""
        return TopologyReport()

    def verify(self, destinations: Iterable[str], *, max_delay: timedelta | None = None) -> TopologyReport:
        """Return an empty report."""
        return TopologyReport()

    def check(self, message: DelayedMessage, now: datetime) -> None:
        """Accept it."""

    def send(self, messages: Iterable[DelayedMessage]) -> SendReport:
        """Never called: the fixture replaces it."""
        raise NotImplementedError

    def close(self) -> None:
        """Do nothing: nothing is open."""
