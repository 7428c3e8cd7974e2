"""Trying each host of a cluster, and comparing its nodes' clocks: a message expires by that of its level's leader.

A message that expires where it was put shows no wrong clock, so the nodes themselves are asked: when a connection to
each was opened by its own clock (``connected_at`` in the management API, to the millisecond), or else the header
``Date`` of each management API. Both are compared with one monotonic clock here, so that this machine's time does not
matter.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import httpx
from pika import BlockingConnection

from airflow_delayed.delivery import Finding, State
from airflow_delayed.errors import some
from airflow_delayed.rabbitmq.connection import describe_error, host_name, muted_pika
from airflow_delayed.rabbitmq.management import Management, client_for

if TYPE_CHECKING:
    from pika import ConnectionParameters

#: Seconds for all hosts, which are asked side by side. A slower answer would be too inexact.
_SECONDS = 2.0
#: Seconds by which two clocks may differ beyond the error of the measurement.
_TOLERANCE = 1.0
_RESOURCE = "clocks of the nodes"
#: Seconds by which ``connected_at`` may be behind: it has milliseconds.
_CONNECTED_AT = 0.001
#: ... and ``Date``, which has seconds, and which RabbitMQ's HTTP server sets once a second.
_DATE = 2.0


@dataclass(frozen=True, slots=True)
class ClockReading:
    """How far a node's clock is ahead of this process's monotonic clock, in seconds: at least and at most."""

    node: str
    least: float
    most: float

    @classmethod
    def of(cls, node: str, stated: float, behind: float, asked: float, answered: float) -> ClockReading:
        """Return the reading of a time that a node stated.

        :param stated: in Unix seconds.
        :param behind: by how much it may be behind the node's clock.
        :param asked: by the monotonic clock, before the node looked at its own.
        :param answered: likewise, after that.
        """
        return cls(node, stated - answered, stated + behind - asked)


def compare(readings: Iterable[ClockReading]) -> Iterator[Finding]:
    """Report the two nodes whose clocks differ most, if they certainly differ by more than a second."""
    exact: dict[str, ClockReading] = {}
    for reading in readings:
        other = exact.setdefault(reading.node, reading)
        if reading.most - reading.least < other.most - other.least:
            exact[reading.node] = reading
    if not exact:
        return
    ahead, behind = max(exact.values(), key=lambda one: one.least), min(exact.values(), key=lambda one: one.most)
    if ahead.least - behind.most > _TOLERANCE:
        yield Finding(
            state=State.BLOCKED,
            resource=_RESOURCE,
            found=f"{ahead.node} is at least {ahead.least - behind.most:.1f} s ahead of {behind.node}; a message"
            " expires by the clock of the node that leads its level, so it may come that much too early or too late",
            code="node-clock",
            remedy="let all nodes follow NTP (chronyc tracking shows how far off a node is)",
        )


@dataclass(frozen=True, slots=True)
class _Opened:
    """A connection that was opened to be found in the management API by its name."""

    name: str
    connection: BlockingConnection
    asked: float
    answered: float


class NodeClocks:
    """Tries several hosts and reads their nodes' clocks, while something else goes on. A context manager.

    It opens a connection to each host, but to none if the cluster has one node.

    :param hosts: for AMQP; they belong to this object, which changes their timeouts.
    :param url: of the management API, or None, as :func:`airflow_delayed.rabbitmq.management.reach` has it.
    """

    def __init__(self, hosts: Sequence[ConnectionParameters], url: str | None, management: Management | None) -> None:
        self._management = management
        several = len(hosts) > 1
        nodes = management.nodes() if management and several else None
        #: The nodes that run; None: unknown.
        self._nodes = None if nodes is None else {name for name, runs in nodes.items() if runs}
        self._wanted = several and (nodes is None or len(nodes) > 1)
        asked = hosts if self._wanted else ()
        self._pool = ThreadPoolExecutor(2 * len(hosts) or 1)
        self._opened = {host_name(host): self._pool.submit(_open, host) for host in asked}
        self._dates = [self._pool.submit(_date, host, url) for host in asked if management]

    def __enter__(self) -> NodeClocks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for each in self._opened.values():
            # now, or when a host has answered after all
            each.add_done_callback(_close)
        self._pool.shutdown(wait=False)

    def judge(self, why: str | None) -> Iterator[Finding]:
        """Report the hosts that do not answer, and compare the clocks; where not all can be read, that is unknown.

        :param why: the reason why there is no management API.
        """
        if not self._wanted:
            return
        asked: list[Future[Any]] = [*self._opened.values(), *self._dates]
        wait(asked, timeout=_SECONDS)
        yield from self._unreachable()
        if self._management is None:
            yield Finding(state=State.UNKNOWN, resource=_RESOURCE, found=why, code="node-clock")
            return
        opened = [each for each in self._results() if isinstance(each, _Opened)]
        connected = self._management.connected() if opened else {}
        readings = list(self._readings(opened, connected))
        yield from compare(readings)
        yield from self._unread({reading.node for reading in readings}, any(one.name in connected for one in opened))

    def _unread(self, read: set[str], exactly: bool) -> Iterator[Finding]:
        """Report that not all clocks were read, or not exactly for want of a right.

        :param exactly: whether the management API showed a connection that was opened for that.
        """
        missing = sorted((self._nodes or set()) - read)
        if missing or (self._nodes is None and len(read) < 2):
            names = f" ({some(missing, separator=', ')})" if missing else ""
            yield Finding(
                state=State.UNKNOWN,
                resource=_RESOURCE,
                found=f"not all of them could be read{names}",
                code="node-clock",
                remedy="list each node in the host field of the connection, and let the management API of each answer"
                " (without the extra management_url, which names one)",
            )
        elif self._nodes is None and not exactly:
            yield Finding(
                state=State.UNKNOWN,
                resource=_RESOURCE,
                found="the management API shows this user neither nodes nor connections; the clocks of nodes that"
                " answered were compared by their header Date, which is exact to some seconds",
                code="node-clock",
                remedy="rabbitmqctl set_user_tags <user> monitoring",
            )

    def _results(self) -> list[_Opened | str]:
        """Return the connection to each host, or why there is none."""
        late = describe_error(TimeoutError())
        return [each.result() if each.done() else late for each in self._opened.values()]

    def _unreachable(self) -> Iterator[Finding]:
        for name, found in zip(self._opened, self._results(), strict=True):
            if isinstance(found, str):
                yield Finding(
                    state=State.WARNING,
                    resource=f"host {name}",
                    found=f"no login within {_SECONDS:g} s: {found}",
                    code="host-unreachable",
                    remedy="if nothing listens there, start its node; if it takes connections and answers nothing, it"
                    " hangs: restart it; else look for a firewall",
                )

    def _readings(
        self, opened: Iterable[_Opened], connected: Mapping[str, tuple[str, float]]
    ) -> Iterator[ClockReading]:
        for date in self._dates:
            if date.done() and (reading := date.result()):
                yield reading
        for each in opened:
            if each.name in connected:
                node, at = connected[each.name]
                yield ClockReading.of(node, at, _CONNECTED_AT, each.asked, each.answered)


def _open(host: ConnectionParameters) -> _Opened | str:
    name = f"airflow-delayed clock {uuid4()}"
    host.socket_timeout = host.stack_timeout = _SECONDS
    host.client_properties = {"connection_name": name}
    asked = time.monotonic()
    try:
        with muted_pika():
            connection = BlockingConnection(host)
    except Exception as error:
        return describe_error(error, host)
    return _Opened(name, connection, asked, time.monotonic())


def _close(opened: Future[_Opened | str]) -> None:
    found = opened.result()
    if isinstance(found, _Opened) and found.connection.is_open:
        with muted_pika():
            found.connection.close()


def _date(host: ConnectionParameters, url: str | None) -> ClockReading | None:
    asked = time.monotonic()
    found = date_of(host, url, _SECONDS)
    return ClockReading.of(*found, _DATE, asked, time.monotonic()) if found else None


def date_of(host: ConnectionParameters, url: str | None, seconds: float) -> tuple[str, float] | None:
    """Return the node whose management API answers at a host, and its header ``Date`` in Unix seconds.

    :param url: as :func:`airflow_delayed.rabbitmq.management.reach` has it.
    :param seconds: to wait for an answer.
    """
    client, _ = client_for(host, url)
    if client is None:
        return None
    with client:
        try:
            answer = client.get("/api/overview", params={"columns": "node"}, timeout=seconds)
            return str(answer.json()["node"]), parsedate_to_datetime(answer.headers["Date"]).timestamp()
        except (httpx.HTTPError, OSError, ValueError, LookupError, TypeError):
            return None
