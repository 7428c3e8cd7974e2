"""Publishing with confirms, over one connection after another until every message is confirmed.

A :class:`~airflow_delayed.rabbitmq.session.Session` sends over one connection, and sends again there what the broker
refuses. The publisher chooses the host, opens a session for each connection, and decides when to give up.
"""

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
from airflow_delayed.rabbitmq.backlog import Backlog, BodySizes
from airflow_delayed.rabbitmq.confirm_timer import ConfirmTimeout, ConfirmTimer, QuorumLost, SilentDestination
from airflow_delayed.rabbitmq.connection import HostFailover, confirm_timeout, describe_error, host_name, muted_pika
from airflow_delayed.rabbitmq.properties import PropertiesWriter
from airflow_delayed.rabbitmq.session import Session
from airflow_delayed.rabbitmq.topology import DELAYED, Topology

log = logging.getLogger(__name__)

#: Messages that may be unconfirmed at a time.
WINDOW = 1000
#: Seconds before each try to get a lost connection back, as long as nothing is confirmed in between: 41.5 in all.
RECONNECT_WAITS = (0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 10.0)
#: Seconds that a host has to answer between two sends.
_ANSWER_SECONDS = 5.0


class Publisher:
    """Sends messages through the delay levels.

    :param parameters: pika's connection parameters, or those of several hosts, which are tried in turn.
    :param conn_id: names the connection in errors.
    :param topology: the delay levels to send through.
    :param clock: returns the present; a message's delay is the time from then to its due time, rounded up to a second.
    :param reconnect_waits: seconds to wait before each try to reconnect, of several hosts after each round of all; a
        confirm starts them over.
    :param writer: of the messages' AMQP properties; by default in the style of the topology.
    :param on_confirm: called with each message that the broker confirmed.
    :param keep: keep the connection from one send to the next, until :meth:`close`. It sends heartbeats only in
        :meth:`send` and :meth:`service`.
    :param patient: False: a destination's refusal (nack) is final in this send, and costs the others no time.
    :param silence: seconds after which a send that is not patient gives up a destination that confirms nothing.
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
        monotonic: Callable[[], float] = time.monotonic,
        writer: PropertiesWriter | None = None,
        on_confirm: Callable[[DelayedMessage], None] | None = None,
        keep: bool = False,
        patient: bool = True,
        silence: float | None = None,
    ) -> None:
        self._hosts = [parameters] if isinstance(parameters, Parameters) else list(parameters)
        self._conn_id = conn_id
        self._topology = topology
        self._clock = clock
        self._window = window
        self._waits = reconnect_waits
        self._sleep = sleep
        self._monotonic = monotonic
        self._writer = writer
        self._on_confirm = on_confirm
        self._keep = keep
        self._patient = patient
        self._silence = silence
        self._kept: Session | None = None
        self._sizes = BodySizes()

    def send(self, messages: Iterable[DelayedMessage]) -> SendReport:
        """Send all messages over one connection at a time; return when every one is confirmed.

        After a lost connection, unconfirmed messages are sent again with the same ids over the next host. The session
        sends a message again that the broker refuses (nack), on the same connection. While a broker's alarm blocks the
        connection, the send waits. While the broker confirms nothing, or refuses a message, a warning is logged after
        10 s and then at growing times. Of several hosts that confirm nothing the next one is tried after a share of the
        connection's ``confirm_timeout``, or at once if the host takes no login any more. If the levels' queues have
        lost their quorum, or nodes that they need hang, the send ends after 10 to 15 s. A body that is larger than all
        before it is published by itself, for a broker closes the channel if it is too large. After a message that
        cannot be sent no more are taken; the send ends when the published messages are confirmed.

        :raises TransportUnavailable: no host can be reached, an alarm lasts, or quorum is lost. Nothing was sent.
        :raises DestinationMissing: the first message's queue does not exist. Nothing was sent.
        :raises TopologyError: the delay levels are not installed. Nothing was confirmed.
        :raises LimitExceeded: the first message is beyond a limit. Nothing was sent.
        :raises SendFailed: any of this after messages had been published, a message returned, a connection lost
            that did not come back, an alarm that lasts longer than the connection's ``blocked_timeout``, or no confirm,
            or a message refused, for its ``confirm_timeout``. It counts the confirmed and names the others; its cause
            is TransportUnavailable if the connection was at fault, as it is if quorum was lost, and LimitExceeded, with
            the ``message_id``, if a body is larger than the broker's ``max_message_size``. What was published
            without a confirm may still arrive.
        """
        source = iter(messages)
        if not length_hint(messages):
            # do not connect for an empty source; one with a length hint may take a while until its first message
            first = next(source, None)
            if first is None:
                return SendReport()
            source = chain([first], source)
        backlog = Backlog(self._conn_id, source, self._on_confirm)
        failover = HostFailover(self._hosts, self._waits)
        timer = ConfirmTimer(confirm_timeout(self._hosts[0]), len(self._hosts), monotonic=self._monotonic)
        while True:
            confirmed = backlog.report.sent
            session, self._kept = self._kept, None
            again = session is not None
            with muted_pika():
                if session is None:
                    session = self._session(failover.host, backlog)
                else:
                    session.again(backlog)
                reason = session.run(timer)
            if reason is None:
                self._kept = session if session.kept else None
                return backlog.outcome()
            if isinstance(reason, SilentDestination) or (again and not isinstance(reason, ConfirmTimeout)):
                # a destination blocked the connection, and its messages are given up; or the kept connection was lost
                # between two sends, where nothing noticed it
                continue
            if backlog.report.sent > confirmed:
                failover.succeeded()
            if final := self._final(reason, failover.host, session, backlog):
                return self._give_up(backlog, final, reason)
            why = describe_error(reason, failover.host)
            failover.failed(why, opened=session.opened)
            if not backlog.published and failover.none_opened:
                return self._give_up(backlog, str(failover), reason)
            if timer.over:
                return self._give_up(backlog, self._no_confirm(backlog, failover, timer), reason)
            wait = failover.wait()
            if wait is None:
                return self._give_up(backlog, f"{failover}; {failover.tries} tries to connect again", reason)
            log.warning(
                "Connection %r was lost after %s confirmed messages (%s); what is unconfirmed is sent again in %s s",
                self._conn_id,
                f"{backlog.report.sent:,}",
                why,
                wait,
            )
            self._sleep(wait)
            timer.add(wait)

    def service(self) -> None:
        """Keep the connection open between two sends, and check that the broker answers; open one if there is none.

        :raises TransportUnavailable: no host answers.
        """
        session, self._kept = self._kept, None
        with muted_pika():
            if session is not None and session.service(_ANSWER_SECONDS):
                self._kept = session
                return
            # the broker was restarted since the last call, or something between closed an idle connection
            failover = HostFailover(self._hosts, ())
            while True:
                session = self._session(failover.host, Backlog(self._conn_id, iter(())))
                reason = session.run(ConfirmTimer(_ANSWER_SECONDS, 1, monotonic=self._monotonic))
                if session.kept:
                    self._kept = session
                    return
                reason = reason or ConnectionError("the broker closed the channel")
                failover.failed(describe_error(reason, failover.host), opened=session.opened)
                if failover.wait() is None:
                    raise TransportUnavailable(f"connection {self._conn_id!r}: {failover}") from reason

    def _session(self, host: Parameters, backlog: Backlog) -> Session:
        return Session(
            host,
            backlog,
            hosts=self._hosts,
            topology=self._topology,
            clock=self._clock,
            window=self._window,
            sizes=self._sizes,
            writer=self._writer,
            keep=self._keep,
            patient=self._patient,
            silence=None if self._patient else self._silence,
        )

    def close(self) -> None:
        """Close a connection that was kept."""
        session, self._kept = self._kept, None
        if session is not None:
            with muted_pika():
                session.close()

    def _final(self, reason: BaseException, host: Parameters, session: Session, backlog: Backlog) -> str | None:
        """Return why no other connection is tried; None if one is."""
        if isinstance(reason, ConnectionBlockedTimeout):
            return (
                f"{host_name(host)}: the broker's alarm ({session.blocked or 'no reason given'}) has kept it from"
                f" taking messages for {host.blocked_connection_timeout:g} s; free memory or disk on the broker, or"
                " wait longer with the connection's extra blocked_timeout"
            )
        if isinstance(reason, QuorumLost):
            return f"{host_name(host)}: {reason}. Sending ended{_arrives(backlog)}"
        return None

    def _no_confirm(self, backlog: Backlog, failover: HostFailover, timer: ConfirmTimer) -> str:
        return (
            f"{failover}. Sending ended after {timer.timeout:g} s without a confirm (the connection's extra"
            " confirm_timeout). Have queues lost their quorum, or is the host frozen? verify() and 'airflow delayed"
            " doctor' show it"
            f"{_arrives(backlog)}"
        )

    def _give_up(self, backlog: Backlog, why: str, reason: BaseException) -> SendReport:
        nothing = "" if backlog.published else ". Nothing was sent"
        cause = TransportUnavailable(f"connection {self._conn_id!r}: {why}{nothing}")
        cause.__cause__ = reason
        backlog.give_up(cause)
        return backlog.outcome()


def _arrives(backlog: Backlog) -> str:
    return "; what is unconfirmed may still arrive, and a retry sends it with the same ids" if backlog.published else ""
