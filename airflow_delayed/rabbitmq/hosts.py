"""The hosts of one connection: tried in turn, and each named with what kept it from being used."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from pika import BlockingConnection
from pika.adapters.utils.connection_workflow import AMQPConnectorException
from pika.exceptions import AMQPError

from airflow_delayed.errors import TransportUnavailable
from airflow_delayed.rabbitmq.connection import explain
from airflow_delayed.rabbitmq.decoding import DecodingSelectConnection
from airflow_delayed.rabbitmq.quiet import quiet

if TYPE_CHECKING:
    from pika import ConnectionParameters
    from pika.connection import Parameters

#: Seconds that a host has to log a client in when a connection is tested, and seconds after which nobody waits longer
#: (a name may stand for several addresses, and looking it up takes time too).
TEST_SECONDS = 5.0
_TEST_LIMIT = 8.0
#: What opening a connection may raise: a host that takes it and then says nothing has an error outside of AMQPError.
_ERRORS = (AMQPError, AMQPConnectorException, OSError)
#: The connection inside of a blocking one, which can be chosen by a private argument alone, of a wrong type.
_INNER: Any = DecodingSelectConnection


def host_name(host: Parameters) -> str:
    """Return a host and its port, as errors name them."""
    return f"[{host.host}]:{host.port}" if ":" in host.host else f"{host.host}:{host.port}"


def connect(conn_id: str, hosts: Sequence[ConnectionParameters]) -> BlockingConnection:
    """Log in at the first host that lets us.

    :raises TransportUnavailable: none does; it names each with its cause.
    """
    causes = []
    for host in hosts:
        try:
            return BlockingConnection(host, _impl_class=_INNER)
        except _ERRORS as error:
            causes.append(f"{host_name(host)}: {explain(error, host)}")
            last = error
    raise TransportUnavailable(f"connection {conn_id!r}: {'; '.join(causes)}") from last


def test(hosts: Sequence[ConnectionParameters]) -> list[str | None]:
    """Log in at all hosts at once; return for each what is wrong with it, or None. Takes a few seconds at most."""

    def cause(host: ConnectionParameters) -> str | None:
        host.socket_timeout = host.stack_timeout = TEST_SECONDS
        try:
            with quiet():
                BlockingConnection(host).close()
        except _ERRORS as error:
            return explain(error, host)
        return None

    # a thread that hangs in the system's resolver is left to itself
    pool = ThreadPoolExecutor(len(hosts))
    tests = [pool.submit(cause, host) for host in hosts]
    wait(tests, timeout=_TEST_LIMIT)
    pool.shutdown(wait=False)
    return [each.result() if each.done() else explain(TimeoutError()) for each in tests]


class Turns:
    """Which host comes next, and after how long a wait.

    :param waits: seconds to wait after each time that no host was of use; a success starts them over.
    """

    def __init__(self, hosts: Sequence[Parameters], waits: Sequence[float]) -> None:
        self._hosts = hosts
        self._waits = waits
        self._next = 0
        self._failures: list[str] = []
        self._unopened = 0

    @property
    def host(self) -> Parameters:
        """The host whose turn it is."""
        return self._hosts[self._next]

    @property
    def tries(self) -> int:
        """How often it was tried to connect again since the last success."""
        return max(0, len(self._failures) - 1)

    @property
    def all_shut(self) -> bool:
        """Whether not one host of the last round let us in."""
        return self._unopened >= len(self._hosts)

    def succeeded(self) -> None:
        """Note that a host was of use, whatever happened to its connection then."""
        self._failures.clear()

    def failed(self, why: str, *, opened: bool) -> None:
        """Note what happened to this host's connection, and go on to the next."""
        self._failures.append(f"{host_name(self.host)}: {why}")
        self._unopened = 0 if opened else self._unopened + 1
        self._next = (self._next + 1) % len(self._hosts)

    def wait(self) -> float | None:
        """Return how many seconds to wait; None if it is time to give up."""
        rounds, more = divmod(len(self._failures), len(self._hosts))
        if more:
            return 0
        return self._waits[rounds - 1] if rounds <= len(self._waits) else None

    def __str__(self) -> str:
        """Each host of the last round and what was wrong with it."""
        return "; ".join(self._failures[-len(self._hosts) :])
