"""Stand-ins for brokers, databases and clocks while a test has the fixture ``delayed``."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import datetime, timedelta
from functools import wraps
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from airflow_delayed import clock, delivery
from airflow_delayed.delivery import Finding, SendReport, State, TopologyReport
from airflow_delayed.message import EPOCH, DelayedMessage
from airflow_delayed.testing.delayed import Delayed, RecordedMessage, variable_of

if TYPE_CHECKING:
    import pytest

#: The type of a connection that the test does not define.
_ANY = "any"
#: Connections that Airflow's own documentation has.
_KNOWN = {"aws_default": "aws", "rabbitmq_default": "rabbitmq", "amqp_default": "amqp"}
#: Seconds: a sleep that never ends early.
_AGES = 1e9


def played(patch: pytest.MonkeyPatch, folder: Path) -> Delayed:
    """Install the stand-ins, and return the object that the fixture passes to a test.

    :param folder: for the stores' files.
    """
    delayed = Delayed(patch)
    defined_type = delivery.type_of

    def type_of(conn_id: str) -> str | None:
        _ensure(delayed, conn_id, _KNOWN.get(conn_id, _ANY))
        return defined_type(conn_id)

    patch.setattr(clock, "_present", lambda: delayed.now)
    patch.setattr(clock, "_skip", delayed.advance)
    patch.setitem(delivery.BUILT_IN, _ANY, f"{__name__}:_AnyTransport")
    for module in ("airflow_delayed.delivery", "airflow_delayed.operators.topology"):
        patch.setattr(f"{module}.type_of", type_of)
    others = [entry.value for entry in entry_points(group="airflow_delayed.delivery")]
    for target in dict.fromkeys([*others, *delivery.BUILT_IN.values()]):
        module, _, name = target.partition(":")
        try:
            hook = getattr(import_module(module), name)
        except ImportError:
            # its extra is not installed
            continue
        if target == "airflow_delayed.hooks.store:DelayedStoreHook":
            _store(delayed, patch, hook, folder)
        else:
            _transport(delayed, patch, hook)
    return delayed


def _ensure(delayed: Delayed, conn_id: str, conn_type: str) -> None:
    if variable_of(conn_id) not in os.environ:
        delayed.connection(conn_id, conn_type)


def _replace(patch: pytest.MonkeyPatch, owner: Any, **methods: Any) -> None:
    for name, method in methods.items():
        # wraps: an option that the method does not have is an error as ever
        patch.setattr(owner, name, wraps(getattr(owner, name))(method))


def _transport(delayed: Delayed, patch: pytest.MonkeyPatch, hook: Any) -> None:
    """Record sent messages, and report all queues as existing."""
    made = hook.__init__

    def init(self: Any, conn_id: str = getattr(hook, "default_conn_name", ""), *arguments: Any, **options: Any) -> None:
        _ensure(delayed, conn_id, getattr(hook, "conn_type", _ANY))
        made(self, conn_id, *arguments, **options)

    def install(self: Any, destinations: Iterable[str], **options: Any) -> TopologyReport:
        return TopologyReport(tuple(Finding(state=State.OK, resource=f"queue {name}") for name in destinations))

    def verify(self: Any, destinations: Iterable[str], **options: Any) -> TopologyReport:
        return TopologyReport()

    def send(self: Any, messages: Iterable[DelayedMessage]) -> SendReport:
        report = SendReport()
        for message in messages:
            self.check(message, delayed.now)
            delayed.sent.append(RecordedMessage.of(message, self.conn_id))
            report.add(message)
        return report

    def no_broker(self: Any, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError(f"the fixture `delayed` has no broker for this method of {self.conn_id!r}")

    _replace(patch, hook, __init__=init, install=install, verify=verify, send=send)
    # how hooks would reach a broker
    for name in ("_make_client", "_hosts"):
        patch.setattr(hook, name, no_broker, raising=False)


def _store(delayed: Delayed, patch: pytest.MonkeyPatch, hook: Any, folder: Path) -> None:
    """Let the store's own code work on SQLite, by the test's clock."""
    from sqlalchemy import create_engine, event

    from airflow_delayed.store.api import Store, engine_options, prepare
    from airflow_delayed.store.dispatch import dispatcher as dispatching
    from airflow_delayed.store.dispatch import loop
    from airflow_delayed.store.dispatch.queue_tables import QueueTables

    verified, dispatcher, deliver = hook.verify, hook.dispatcher, QueueTables.deliver

    def make_engine(self: Any) -> Any:
        path = folder / quote(self.conn_id, safe="")

        def connected(connection: Any, _record: object) -> None:
            # how the store asks SQLite for the time
            connection.create_function("strftime", 2, lambda *_: delayed.now.replace(tzinfo=None).isoformat())
            if self.schema is not None:
                connection.execute(f'ATTACH DATABASE ? AS "{self.schema}"', [f"{path}:{quote(self.schema, safe='')}"])

        engine = create_engine(f"sqlite:///{path}", **engine_options("sqlite"))
        event.listen(engine, "connect", connected)
        Store(self.conn_id, lambda: prepare(engine), table=self.table.name, schema=self.schema).install(())
        delayed.stores[self.conn_id, self.table.name, self.schema] = None
        return engine

    def verify(self: Any, destinations: Iterable[str], **options: Any) -> Any:
        self.install(names := list(destinations), create_destinations=True)
        return verified(self, names, **options)

    def by_the_clock(self: Any, *arguments: Any, **options: Any) -> Any:
        clocks = {"monotonic": lambda: (delayed.now - EPOCH).total_seconds(), "sleep": delayed.advance}
        return dispatcher(self, *arguments, **clocks, **options)

    def delivered(self: Any, connection: Any, messages: Any) -> Any:
        failures = deliver(self, connection, messages)
        conn_id = unquote(Path(connection.engine.url.database).name)
        good = [message for message in messages if message.message_id not in failures]
        delayed.sent.extend(RecordedMessage.of(message, conn_id) for message in good)
        return failures

    _replace(patch, hook, _make_engine=make_engine, verify=verify, dispatcher=by_the_clock)
    _replace(patch, QueueTables, deliver=delivered)
    patch.setattr(dispatching, "POLL", _AGES)
    patch.setattr(loop, "PASS_EVERY", _AGES)


class _AnyTransport:
    """Delivers any message with any delay, and takes any option; the rest is replaced as for all transports."""

    horizon = timedelta(days=36_500)

    def __init__(self, conn_id: str, **options: object) -> None:
        self.conn_id = conn_id

    def check(self, message: DelayedMessage, now: datetime) -> None:
        pass

    def close(self) -> None:
        pass

    install = verify = send = close
