"""What takes the place of brokers, databases and clocks while a test has the fixture ``delayed``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import cached_property, partial, wraps
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow_delayed import delivery, message, pauses
from airflow_delayed.delivery import Finding, SendReport, State, TopologyReport
from airflow_delayed.message import EPOCH, DelayedMessage
from airflow_delayed.testing.delayed import ANY, Delayed

if TYPE_CHECKING:
    import pytest

_ANYTHING = "airflow_delayed.testing.anything:AnyTransport"
_STORE = "airflow_delayed.hooks.store:DelayedStoreHook"
#: Seconds: so long a sleep ends in one step.
_AGES = 1e9
#: By what hooks would reach a broker.
_WAYS_OUT = ("_make_client", "_hosts")


def played(patch: pytest.MonkeyPatch, folder: Path) -> Delayed:
    """Put everything in its place, and return what the fixture gives a test.

    :param folder: for the stores' files.
    """
    delayed = Delayed(patch)
    patch.setattr(message, "_present", lambda: delayed.now)
    patch.setattr(pauses, "_skip", delayed.advance)
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
    """Note what is sent, and find all queues there."""

    def install(self: Any, destinations: Iterable[str], **options: Any) -> TopologyReport:
        return TopologyReport(tuple(Finding(state=State.OK, resource=f"queue {name}") for name in destinations))

    def verify(self: Any, destinations: Iterable[str], **options: Any) -> TopologyReport:
        return TopologyReport()

    def uninstall(self: Any, **options: Any) -> TopologyReport:
        return TopologyReport()

    def send(self: Any, messages: Iterable[DelayedMessage]) -> SendReport:
        report = SendReport()
        for one in messages:
            self.check(one, delayed.now)
            delayed.note(self.conn_id, one)
            report.add(one)
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
    from airflow_delayed.store import dispatch, setup, stay
    from airflow_delayed.store.queue_table import QueueTables
    from airflow_delayed.triggers import store_dispatch

    conn_ids: dict[str, str] = {}

    def engine(self: Any) -> Any:
        made = _engine(delayed, folder / f"{quote(self.conn_id, safe='')}.db", self.schema)
        conn_ids[str(made.url.database)] = self.conn_id
        setup.install(made, self.tables, [], schema=self.schema, create_queues=False, dry_run=False)
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
        for one in messages:
            if one.message_id not in failures:
                delayed.note(conn_ids[str(connection.engine.url.database)], one)
        return failures

    def seconds() -> float:
        return (delayed.now - EPOCH).total_seconds()

    shown = cached_property(engine)
    shown.__set_name__(hook, "engine")
    patch.setattr(hook, "engine", shown)
    patch.setattr(hook, "verify", verify)
    patch.setattr(hook, "dispatcher", by_the_clock)
    patch.setattr(QueueTables, "deliver", delivered)
    patch.setattr(dispatch, "LONGEST_SLEEP", _AGES)
    patch.setattr(stay, "PASS_EVERY", _AGES)
    patch.setattr(store_dispatch, "Stay", partial(stay.Stay, monotonic=seconds))
    patch.setattr(store_dispatch, "waiter_for", lambda *_: _Jump(delayed.advance))


def _engine(delayed: Delayed, path: Path, schema: str | None) -> Any:
    from sqlalchemy import create_engine, event

    from airflow_delayed.store.engine import engine_options, prepare

    def prepared(connection: Any, _record: object) -> None:
        # how the store asks SQLite for the time
        connection.create_function("strftime", 2, lambda *_: delayed.now.replace(tzinfo=None).isoformat())
        if schema is not None:
            connection.execute(f'ATTACH DATABASE ? AS "{schema}"', [f"{path}.{quote(schema, safe='')}"])

    made = create_engine(f"sqlite:///{path}", **engine_options("sqlite"))
    event.listen(made, "connect", prepared)
    return prepare(made)


class _Jump:
    """A waiter that moves the clock instead."""

    longest = _AGES

    def __init__(self, advance: Callable[[timedelta | float], None]) -> None:
        self._advance = advance

    def wait(self, seconds: float) -> bool:
        self._advance(seconds)
        return False

    def wake(self) -> None:
        """Do nothing: nobody sleeps."""

    def close(self) -> None:
        """Do nothing: nothing is open."""
