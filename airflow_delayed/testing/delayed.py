"""What a test of a DAG sees of its messages, and the clock that it moves."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import closing
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow_delayed.delivery import Clock, Delivery, delivery_for
from airflow_delayed.message import DelayedMessage, delay_of, utc, utcnow
from airflow_delayed.testing.records import Held, Sent, fields_of

if TYPE_CHECKING:
    import pytest
    from airflow.sdk import BaseOperator

    from airflow_delayed.hooks.store import DelayedStoreHook

#: Connections that Airflow's own documentation has; others are of no type until a test says it.
_KNOWN = {"aws_default": "aws", "rabbitmq_default": "rabbitmq", "amqp_default": "amqp"}
#: The type of a connection that a test says nothing of: any message, any delay.
ANY = "any"


class Delayed:
    """The fixture ``delayed``: operators and hooks of this package run as they are, but no broker is asked.

    What is sent is noted, as if every queue were there. What waits in a store is in a SQLite file of the test's own,
    and goes through the store's own code. The clock stands still until the test moves it, or something waits: then it
    is moved to the end of the wait. No connection need be defined; one that is, by an environment variable
    ``AIRFLOW_CONN_...``, says its type, and so which transport's limits are checked.

    Not played is what a broker alone can do: hooks' other methods, FifoCycleSensor, RabbitMQMessageTrigger.

    :param patch: undone when the test is over.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._now = utcnow().replace(microsecond=0)
        self._patch = patch
        self._sent: list[Sent] = []
        self._stores: dict[tuple[str, str, str | None], None] = {}
        self._runs = 0

    # -- the clock -----------------------------------------------------------------------------------------------------

    @property
    def now(self) -> datetime:
        """The present, in UTC: the machine's time when the test began, cut to the second, until it is moved."""
        return self._now

    def move_to(self, moment: datetime) -> None:
        """Set the clock.

        :param moment: aware; it may be earlier, too.
        :raises NaiveTime: it has no time zone.
        """
        self._now = utc("moment", moment)

    def advance(self, span: timedelta | float) -> None:
        """Move the clock on.

        :param span: a timedelta, or seconds.
        """
        self._now += delay_of(span, "span")

    # -- connections ---------------------------------------------------------------------------------------------------

    def connection(self, conn_id: str, conn_type: str, **extra: object) -> str:
        """Say of which type a connection is, and return its name: ``aws``, ``rabbitmq``, ``postgres``...

        A transport's limits count, and its options may be given, once its type is known; of a SQL connection as
        ``conn_id=`` the destinations are queue tables. A store (``store_conn_id=``) need not be told.

        :param extra: of the connection, such as ``unrestricted_delay=True``.
        """
        self._define(conn_id, conn_type, extra)
        return conn_id

    def type_of(self, conn_id: str) -> str | None:
        """Return a connection's type; one that is not defined gets one."""
        from airflow.sdk import BaseHook

        self.ensure(conn_id, _KNOWN.get(conn_id, ANY))
        return BaseHook.get_connection(conn_id).conn_type

    def ensure(self, conn_id: str, conn_type: str) -> None:
        """Define a connection that is not."""
        if _variable(conn_id) not in os.environ:
            self._define(conn_id, conn_type, {})

    def _define(self, conn_id: str, conn_type: str, extra: Mapping[str, object]) -> None:
        self._patch.setenv(_variable(conn_id), json.dumps({"conn_type": conn_type, "extra": dict(extra)}))

    # -- messages ------------------------------------------------------------------------------------------------------

    @property
    def sent(self) -> list[Sent]:
        """All that was handed to transports or put into queue tables, in order; each delivers it when it is due."""
        return list(self._sent)

    @property
    def held(self) -> list[Held]:
        """What waits in stores, by due time."""
        found = [message for store in self._stores for message in self._in(*store)]
        return sorted(found, key=lambda message: (message.due_at, message.message_id))

    def arrived(self, destination: str | None = None) -> list[Sent]:
        """Return what has arrived by now, by due time; with a destination, only there."""
        found = [one for one in self._sent if one.due_at <= self._now and destination in (None, one.destination)]
        return sorted(found, key=lambda message: message.due_at)

    def dispatch(self, lookahead: timedelta = timedelta(minutes=15)) -> list[Sent]:
        """Hand over what stores hold and is due within ``lookahead``, as StoreDispatchOperator does; return it.

        It is handed over no earlier than its transport can delay it: 870 s on SQS, when it is due to a queue table.

        :raises DispatchFailed: a message was given up.
        """
        before = len(self._sent)
        for conn_id, table, schema in list(self._stores):
            names = list(dict.fromkeys(message.conn_id for message in self._in(conn_id, table, schema)))
            if names:
                with closing(_store(conn_id, table, schema)) as store:
                    store.dispatcher(names, _transport, lookahead=lookahead).run()
        return self._sent[before:]

    def run(self, operator: BaseOperator, **context: Any) -> Any:
        """Execute one operator, without Airflow's database, and return its result; templates are rendered.

        Where it is deferred, its trigger runs here, and then it is resumed. Each call is the first try of a new run.

        :param context: further names for templates, or in place of the usual: ``params=``, ``run_id=``...
        """
        from airflow_delayed.testing.running import context_of, executed

        self._runs += 1
        return executed(operator, {**context_of(operator, f"run-{self._runs}", self._now), **context})

    def note(self, conn_id: str, message: DelayedMessage) -> None:
        """Note what was handed over."""
        self._sent.append(Sent(conn_id=conn_id, **fields_of(message)))  # type: ignore[arg-type]

    def opened(self, store: DelayedStoreHook) -> None:
        """Note that there is a store."""
        self._stores[store.conn_id, store.table.name, store.schema] = None

    def _in(self, conn_id: str, table: str, schema: str | None) -> list[Held]:
        from sqlalchemy import select

        from airflow_delayed.store.rows import to_message

        with closing(_store(conn_id, table, schema)) as store, store.engine.connect() as connection:
            rows = connection.execute(select(store.table)).mappings().all()
        return [
            Held(store_conn_id=conn_id, conn_id=row["DeliverConnId"] or conn_id, **fields_of(to_message(row)))  # type: ignore[arg-type]
            for row in rows
        ]


def _variable(conn_id: str) -> str:
    return f"AIRFLOW_CONN_{conn_id.upper()}"


def _store(conn_id: str, table: str, schema: str | None) -> DelayedStoreHook:
    from airflow_delayed.hooks.store import DelayedStoreHook

    return DelayedStoreHook(conn_id, table=table, schema=schema)


def _transport(conn_id: str, clock: Clock) -> Delivery:
    return delivery_for(conn_id, clock=clock)
