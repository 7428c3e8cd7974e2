"""The order in which a connection's hosts are tried. This process remembers the host that answered last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from pika.connection import Parameters

Host = TypeVar("Host", bound=Parameters)

#: For each list of hosts the index of the host to try first: the one after the host that failed last. Hooks, sends and
#: watchers with the same hosts share it, so a frozen host costs its timeout once, and not once a call.
_first: dict[tuple[str, ...], int] = {}


def host_name(host: Parameters) -> str:
    """Return a host and its port, as errors name them."""
    return f"[{host.host}]:{host.port}" if ":" in host.host else f"{host.host}:{host.port}"


def in_turn(hosts: Sequence[Host]) -> list[Host]:
    """Return hosts in the order in which to try them: first the host that answered last, then the next ones."""
    first = _first.get(_names(hosts), 0)
    return [*hosts[first:], *hosts[:first]]


def failed(hosts: Sequence[Host], host: Host) -> None:
    """Remember that a host did not answer, or lost the connection: from now on the next one is tried first.

    :param hosts: all hosts of the connection, as its field has them.
    """
    names = _names(hosts)
    _first[names] = (names.index(host_name(host)) + 1) % len(names)


def _names(hosts: Sequence[Parameters]) -> tuple[str, ...]:
    return tuple(map(host_name, hosts))


class HostFailover:
    """Chooses the next host after a failure, and the wait before it.

    :param waits: seconds to wait after each round in which every host failed; a success starts them over.
    """

    def __init__(self, hosts: Sequence[Parameters], waits: Sequence[float]) -> None:
        self._all = hosts
        self._hosts = in_turn(hosts)
        self._waits = waits
        self._next = 0
        self._failures: list[str] = []
        self._unopened = 0

    @property
    def host(self) -> Parameters:
        """The host to connect to."""
        return self._hosts[self._next]

    @property
    def tries(self) -> int:
        """How many reconnects were tried since the last success."""
        return max(0, len(self._failures) - 1)

    @property
    def none_opened(self) -> bool:
        """Whether no host of the last round opened a connection: it did not answer, or refused the login."""
        return self._unopened >= len(self._hosts)

    def succeeded(self) -> None:
        """Note that this host confirmed messages, whatever happened to its connection then."""
        self._failures.clear()

    def failed(self, why: str, *, opened: bool) -> None:
        """Note why this host's connection failed, and go on to the next host."""
        self._failures.append(f"{host_name(self.host)}: {why}")
        failed(self._all, self.host)
        self._unopened = 0 if opened else self._unopened + 1
        self._next = (self._next + 1) % len(self._hosts)

    def wait(self) -> float | None:
        """Return the seconds to wait before the next host; None to give up."""
        rounds, more = divmod(len(self._failures), len(self._hosts))
        if more:
            return 0
        return self._waits[rounds - 1] if rounds <= len(self._waits) else None

    def __str__(self) -> str:
        """Each host of the last round and its problem."""
        return "; ".join(self._failures[-len(self._hosts) :])
