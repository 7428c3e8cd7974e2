"""The hook for RabbitMQ: an Airflow connection as a transport with delay levels."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING

from airflow.sdk import BaseHook

from airflow_delayed.compat import extra_of, limits
from airflow_delayed.delivery import Clock, Connection, TopologyReport, check_type
from airflow_delayed.errors import MissingExtra, TransportUnavailable
from airflow_delayed.message import utcnow
from airflow_delayed.rabbitmq.topology import Topology
from airflow_delayed.rabbitmq.transport import RabbitMQTransport

if TYPE_CHECKING:
    from pika import BlockingConnection


class RabbitMQDelayHook(RabbitMQTransport, BaseHook):
    """Delivers messages to RabbitMQ queues at their due time; an :class:`airflow_delayed.delivery.Delivery`.

    A destination is a queue. Delays are whole seconds, rounded up, of at most 268,435,455 s, by the sender's clock.
    Needs RabbitMQ 3.10 or later for its quorum queues with a time to live and at-least-once dead-lettering.

    The connection (type ``rabbitmq``, ``amqp``, or ``amqps`` for TLS): host, port (5672, with TLS 5671), login,
    password, schema = virtual host (``/``). Of several hosts, ``rabbit1,rabbit2:5673``, which share all else, the first
    that answers is used, and the next when a connection is lost. As a URI: ``amqps://user:password@rabbit1/%2F?verify=
    verify_peer&heartbeat=30``; several hosts have to be percent-encoded there (``rabbit1%2Crabbit2%3A5673``).

    Its extra has the names of RabbitMQ's own URI parameters:

    - ``ssl`` (not RabbitMQ's): true for TLS; ``cacertfile``: PEM file of the authorities that may have signed the
      broker's certificate, by default the system's; ``verify``: ``verify_peer`` (the default) or ``verify_none``;
      ``server_name_indication``: the name that the certificate has to be for, by default the host;
    - ``certfile``, ``keyfile``: PEM files of the client's certificate and of its private key, without a passphrase (the
      key may be in ``certfile``); ``auth_mechanism``: ``plain`` (the default), or ``external`` to log in by it;
    - ``heartbeat``: seconds, by default as the broker proposes (60); a connection on which nothing comes is given up
      after that and 5 s, at most twice as long; 0: never; ``connection_timeout``: **milliseconds** to connect to a
      host and log in (15000, of several hosts 5000 each);
    - ``blocked_timeout`` (not RabbitMQ's): seconds to wait for a broker that is short of memory or disk (300).
    - ``confirm_timeout`` (not RabbitMQ's): seconds that a send may be without a confirm, or a message refused (60), but
      for such an alarm.
    - ``management_url`` (not RabbitMQ's): of the management API, ``http(s)://[user:password@]host:port``, by default
      10,000 ports above AMQP's on the same host; ``none`` to do without. With TLS, one with http needs a login in it.

    :param clock: what is taken for the present.
    """

    conn_name_attr = "conn_id"
    default_conn_name = "rabbitmq_default"
    conn_type = "rabbitmq"
    hook_name = "RabbitMQ (delayed delivery)"

    def __init__(
        self,
        conn_id: str = default_conn_name,
        *,
        clock: Clock = utcnow,
        topology: Topology | str | None = None,
        routing: str | None = None,
    ) -> None:
        super().__init__(conn_id, self._plain, clock=clock, topology=topology, routing=routing)

    def verify(self, destinations: Iterable[str], *, max_delay: timedelta | None = None) -> TopologyReport:
        """Compare as the transport does, and add a finding for each feature that this version of Airflow lacks."""
        return TopologyReport((*super().verify(destinations, max_delay=max_delay).findings, *limits()))

    def get_conn(self) -> BlockingConnection:
        """Log in at the first host that answers, and return the connection of pika; close it after use.

        Each call makes a new one. The hook itself sends through others, which nothing here disturbs.

        :raises TransportUnavailable: no host accepts the login.
        """
        hosts = self._hosts()
        from airflow_delayed.rabbitmq.connection import connect

        return connect(self.conn_id, hosts)

    def test_connection(self) -> tuple[bool, str]:
        """Log in within a few seconds; return the problem in plain words, or the hosts that answered.

        The text does not name the connection: the UI tests it under a name that Airflow has made up.
        """
        try:
            hosts, topology = self._hosts(), self.topology
        except (MissingExtra, TransportUnavailable, ValueError) as error:
            return False, str(error).removeprefix(f"connection {self.conn_id!r}: ")
        from airflow_delayed.rabbitmq.connection import host_name, login_problems

        causes = [(host_name(host), cause) for host, cause in zip(hosts, login_problems(hosts), strict=True)]
        bad = "; ".join(f"{name}: {cause}" for name, cause in causes if cause)
        good = ", ".join(name for name, cause in causes if not cause)
        if not good:
            return False, bad
        text = f"Connected to RabbitMQ at {good}, virtual host {hosts[0].virtual_host!r}; topology {topology.name!r}"
        return True, f"{text}. Not all hosts can be used: {bad}" if bad else text

    def _plain(self) -> Connection:
        given = self.get_connection(self.conn_id)
        check_type(self.conn_id, given.conn_type, self.conn_type)
        return Connection(
            conn_id=self.conn_id,
            conn_type=given.conn_type or "",
            host=given.host,
            port=given.port,
            login=given.login,
            password=given.password,
            schema=given.schema,
            extra=extra_of(given),
        )
