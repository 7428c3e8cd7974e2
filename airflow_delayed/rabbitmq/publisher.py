"""Sending with publisher confirms: a window of unconfirmed messages, sent again on a new connection if one is lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from airflow_delayed.delivery import Clock, SendReport
from airflow_delayed.errors import TransportUnavailable
from airflow_delayed.message import DelayedMessage, utcnow
from airflow_delayed.rabbitmq.backlog import Backlog
from airflow_delayed.rabbitmq.connection import explain
from airflow_delayed.rabbitmq.session import Session
from airflow_delayed.rabbitmq.topology import DELAYED, Topology
from airflow_delayed.rabbitmq.writer import PropertiesWriter

if TYPE_CHECKING:
    from pika.connection import Parameters

log = logging.getLogger(__name__)

#: Messages that may be unconfirmed at a time.
WINDOW = 1000
#: Seconds before each try to get a lost connection back, as long as nothing is confirmed in between: 41.5 in all.
RECONNECT_WAITS = (0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 10.0)


class Publisher:
    """Sends messages through the delay levels.

    :param parameters: pika's connection parameters.
    :param conn_id: names the connection in errors.
    :param topology: the delay levels to send through.
    :param clock: what is taken for the present; a message's delay is what then remains, rounded up to a second.
    :param reconnect_waits: seconds to wait before each try to reconnect; a confirm starts them over.
    :param writer: of the messages' AMQP properties; by default in the style of the topology.
    :param on_confirm: called with each message that the broker confirmed.
    """

    def __init__(
        self,
        parameters: Parameters,
        *,
        conn_id: str,
        topology: Topology = DELAYED,
        clock: Clock = utcnow,
        window: int = WINDOW,
        reconnect_waits: Sequence[float] = RECONNECT_WAITS,
        sleep: Callable[[float], None] = time.sleep,
        writer: PropertiesWriter | None = None,
        on_confirm: Callable[[DelayedMessage], None] | None = None,
    ) -> None:
        self._parameters = parameters
        self._conn_id = conn_id
        self._topology = topology
        self._clock = clock
        self._window = window
        self._waits = reconnect_waits
        self._sleep = sleep
        self._writer = writer
        self._on_confirm = on_confirm

    def send(self, messages: Iterable[DelayedMessage]) -> SendReport:
        """Send all messages over one connection; return when every one is confirmed.

        A lost connection or a refusal (nack) has what is unconfirmed sent again with the same ids. After a message
        that cannot be sent no more are taken; those under way are brought to an end first.

        :raises TransportUnavailable: the broker cannot be reached. Nothing was sent.
        :raises DestinationMissing: the first message's queue does not exist. Nothing was sent.
        :raises TopologyError: the delay levels are not installed. Nothing was confirmed.
        :raises LimitExceeded: the first message is beyond a limit. Nothing was sent.
        :raises SendFailed: any of this after messages had been published, a message returned, a message refused five
            times, or a connection lost that did not come back. It counts the confirmed and names the others.
        """
        source = iter(messages)
        first = next(source, None)
        if first is None:
            return SendReport()
        backlog = Backlog(self._conn_id, chain([first], source), self._on_confirm)
        tries = 0
        while True:
            confirmed = backlog.report.sent
            session = Session(
                self._parameters,
                backlog,
                topology=self._topology,
                clock=self._clock,
                window=self._window,
                writer=self._writer,
            )
            lost = session.run()
            if lost is None:
                return backlog.outcome()
            why = explain(lost)
            if not backlog.published and not session.opened:
                raise TransportUnavailable(f"connection {self._conn_id!r}: {why}. Nothing was sent") from lost
            if backlog.report.sent > confirmed:
                tries = 0
            if tries == len(self._waits):
                backlog.give_up(f"not confirmed: {why}; {tries} tries to connect again")
                return backlog.outcome()
            log.warning(
                "Connection %r was lost after %s confirmed messages (%s); what is unconfirmed is sent again in %s s",
                self._conn_id,
                f"{backlog.report.sent:,}",
                why,
                self._waits[tries],
            )
            self._sleep(self._waits[tries])
            tries += 1
