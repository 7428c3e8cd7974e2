"""Sending with publisher confirms: a window of unconfirmed messages, sent again on a new connection if one is lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import length_hint

from pika.connection import Parameters
from pika.exceptions import ConnectionBlockedTimeout

from airflow_delayed.delivery import Clock, SendReport
from airflow_delayed.errors import TransportUnavailable
from airflow_delayed.message import DelayedMessage, utcnow
from airflow_delayed.rabbitmq.backlog import Backlog
from airflow_delayed.rabbitmq.connection import explain
from airflow_delayed.rabbitmq.hosts import Turns, host_name
from airflow_delayed.rabbitmq.quiet import quiet
from airflow_delayed.rabbitmq.session import Session
from airflow_delayed.rabbitmq.topology import DELAYED, Topology
from airflow_delayed.rabbitmq.writer import PropertiesWriter

log = logging.getLogger(__name__)

#: Messages that may be unconfirmed at a time.
WINDOW = 1000
#: Seconds before each try to get a lost connection back, as long as nothing is confirmed in between: 41.5 in all.
RECONNECT_WAITS = (0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 10.0)


class Publisher:
    """Sends messages through the delay levels.

    :param parameters: pika's connection parameters, or those of several hosts, which are tried in turn.
    :param conn_id: names the connection in errors.
    :param topology: the delay levels to send through.
    :param clock: what is taken for the present; a message's delay is what then remains, rounded up to a second.
    :param reconnect_waits: seconds to wait before each try to reconnect, of several hosts after each round of all; a
        confirm starts them over.
    :param writer: of the messages' AMQP properties; by default in the style of the topology.
    :param on_confirm: called with each message that the broker confirmed.
    :param keep: keep the connection from one send to the next, until :meth:`close`. Nobody serves it in between, so
        sends must follow each other within seconds.
    """

    def __init__(
        self,
        parameters: Parameters | Sequence[Parameters],
        *,
        conn_id: str,
        topology: Topology = DELAYED,
        clock: Clock = utcnow,
        window: int = WINDOW,
        reconnect_waits: Sequence[float] = RECONNECT_WAITS,
        sleep: Callable[[float], None] = time.sleep,
        writer: PropertiesWriter | None = None,
        on_confirm: Callable[[DelayedMessage], None] | None = None,
        keep: bool = False,
    ) -> None:
        self._hosts = [parameters] if isinstance(parameters, Parameters) else list(parameters)
        self._conn_id = conn_id
        self._topology = topology
        self._clock = clock
        self._window = window
        self._waits = reconnect_waits
        self._sleep = sleep
        self._writer = writer
        self._on_confirm = on_confirm
        self._keep = keep
        self._kept: Session | None = None

    def send(self, messages: Iterable[DelayedMessage]) -> SendReport:
        """Send all messages over one connection at a time; return when every one is confirmed.

        A lost connection or a refusal (nack) has what is unconfirmed sent again with the same ids, after a lost
        connection by way of the next host. A broker whose alarm blocks the connection is waited for. After a message
        that cannot be sent no more are taken; those under way are brought to an end first.

        :raises TransportUnavailable: no host can be reached, or an alarm lasts. Nothing was sent.
        :raises DestinationMissing: the first message's queue does not exist. Nothing was sent.
        :raises TopologyError: the delay levels are not installed. Nothing was confirmed.
        :raises LimitExceeded: the first message is beyond a limit. Nothing was sent.
        :raises SendFailed: any of this after messages had been published, a message returned, a message refused five
            times, a connection lost that did not come back, or an alarm that lasts longer than the connection's
            ``blocked_timeout``. It counts the confirmed and names the others; its cause is TransportUnavailable if
            the connection was at fault.
        """
        source = iter(messages)
        if not length_hint(messages):
            # no connection for nothing; a source that says that it has some may take a while until it gives the first
            first = next(source, None)
            if first is None:
                return SendReport()
            source = chain([first], source)
        backlog = Backlog(self._conn_id, source, self._on_confirm)
        turns = Turns(self._hosts, self._waits)
        while True:
            confirmed = backlog.report.sent
            session, self._kept = self._kept, None
            again = session is not None
            with quiet():
                if session is None:
                    session = Session(
                        turns.host,
                        backlog,
                        topology=self._topology,
                        clock=self._clock,
                        window=self._window,
                        writer=self._writer,
                        keep=self._keep,
                    )
                else:
                    session.again(backlog)
                lost = session.run()
            if lost is None:
                self._kept = session if session.kept else None
                return backlog.outcome()
            if again:
                # it may have been lost before, with nobody there to see it
                continue
            if backlog.report.sent > confirmed:
                turns.succeeded()
            if isinstance(lost, ConnectionBlockedTimeout):
                return self._give_up(backlog, self._alarm(turns.host, session.blocked), lost)
            why = explain(lost, turns.host)
            turns.failed(why, opened=session.opened)
            if not backlog.published and turns.all_shut:
                return self._give_up(backlog, str(turns), lost)
            wait = turns.wait()
            if wait is None:
                return self._give_up(backlog, f"{turns}; {turns.tries} tries to connect again", lost)
            log.warning(
                "Connection %r was lost after %s confirmed messages (%s); what is unconfirmed is sent again in %s s",
                self._conn_id,
                f"{backlog.report.sent:,}",
                why,
                wait,
            )
            self._sleep(wait)

    def close(self) -> None:
        """Close a connection that was kept."""
        session, self._kept = self._kept, None
        if session is not None:
            with quiet():
                session.close()

    def _alarm(self, host: Parameters, reason: str | None) -> str:
        return (
            f"{host_name(host)}: the broker's alarm ({reason or 'no reason given'}) has kept it from taking messages"
            f" for {host.blocked_connection_timeout:g} s; free memory or disk on the broker, or wait longer with the"
            " connection's extra blocked_timeout"
        )

    def _give_up(self, backlog: Backlog, why: str, lost: BaseException) -> SendReport:
        nothing = "" if backlog.published else ". Nothing was sent"
        cause = TransportUnavailable(f"connection {self._conn_id!r}: {why}{nothing}")
        cause.__cause__ = lost
        backlog.give_up(cause)
        return backlog.outcome()
