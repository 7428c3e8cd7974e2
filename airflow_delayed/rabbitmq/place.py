"""A delay topology on a broker, as messages are moved from one to another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

from airflow_delayed.delivery import State, TopologyReport
from airflow_delayed.errors import LimitExceeded, TopologyError
from airflow_delayed.rabbitmq import plan
from airflow_delayed.rabbitmq.facts import Facts
from airflow_delayed.rabbitmq.topology import Topology

if TYPE_CHECKING:
    from pika.adapters.blocking_connection import BlockingConnection
    from pika.connection import Parameters


@dataclass(frozen=True, slots=True)
class Destinations:
    """The destinations of a topology by name; None if the management API does not tell, and why not."""

    there: frozenset[str] | None = None
    bound: frozenset[str] | None = None
    why: str | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """One end of a move.

    :param conn_id: names the connection in errors.
    :param hosts: at least one; who logs in is the same at all.
    :param connect: opens a connection of its own for a while.
    :param facts: asks the management API.
    """

    conn_id: str
    topology: Topology
    hosts: Sequence[Parameters]
    connect: Callable[[], AbstractContextManager[BlockingConnection]]
    facts: Callable[[], Facts]

    def __str__(self) -> str:
        return f"{self.topology.name} of connection {self.conn_id!r}"

    @property
    def user(self) -> str | None:
        """Who is logged in; None if that is told by a certificate."""
        return getattr(self.hosts[0].credentials, "username", None)

    def require(self) -> None:
        """Check that the delay levels are there.

        :raises TopologyError: something is missing or differs.
        """
        with self.connect() as connection:
            report = TopologyReport(plan.compare(connection, plan.plan(self.topology)))
        if report.problems:
            raise TopologyError(self.conn_id, report, topology=self.topology.name)

    def problem(self, destination: str) -> str | None:
        """Say why a destination cannot be sent to; None if it can."""
        try:
            self.topology.check_destination(destination)
        except LimitExceeded as error:
            return str(error)
        exchange = self.topology.routing == "conventional"
        part = plan.Exchange(destination, "fanout", destination=True) if exchange else _queue(destination)
        with self.connect() as connection:
            (found,) = plan.compare(connection, [part])
        if found.state is State.OK:
            return None
        return f"destination {destination!r}: " + ("missing" if found.state is State.MISSING else str(found.found))

    def destinations(self) -> Destinations:
        """Ask the management API which destinations there are, and which of them are bound."""
        facts = self.facts()
        queues = self.topology.routing == "direct"
        there = facts.queues if queues else facts.exchanges
        if facts.bindings is None or there is None:
            return Destinations(why=facts.why)
        before = self.topology.binding_key("x").removesuffix("x")
        ways = [each for each in facts.bindings if each.source == self.topology.delivery_exchange]
        bound = frozenset(each.target for each in ways if each.is_queue == queues and each.key == before + each.target)
        return Destinations(frozenset(there), bound)

    def existing(self, queues: Iterable[str]) -> list[str]:
        """Return which of these queues there are."""
        names = list(queues)
        with self.connect() as connection:
            found = plan.compare(connection, map(_queue, names))
        return [name for name, each in zip(names, found, strict=True) if each.state is not State.MISSING]


def same(one: Place, other: Place) -> bool:
    """Whether two places are one: the same queues in the same virtual host of the same broker, whatever its address."""
    if one.topology.level_prefix != other.topology.level_prefix:
        return False
    # named like a part of the levels, for which the user has the rights
    mark = _queue(f"{one.topology.level_prefix}move-{uuid4()}")
    with one.connect() as connection:
        # it ends with its connection, and to others it is locked
        connection.channel().queue_declare(mark.name, exclusive=True)
        with other.connect() as another:
            (found,) = plan.compare(another, [mark])
    return found.state is not State.MISSING


def _queue(name: str) -> plan.Queue:
    return plan.Queue(name, destination=True)
