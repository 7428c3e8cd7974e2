"""A topology: what the parts of a delay topology are called and how they are declared, as one value.

All of them have the shape of :mod:`airflow_delayed.rabbitmq.levels`; planning, comparing, installing and sending work
on any.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Literal, get_args

from airflow_delayed.errors import LimitExceeded
from airflow_delayed.rabbitmq import levels

#: How a destination is bound: for itself alone, or also for every name that ends in a dot and its own.
Binding = Literal["exact", "suffix"]
#: Where a delayed message enters: a level's queue itself, the exchange of its highest bit, that of the highest level.
Entry = Literal["direct", "top-bit", "top-level"]
#: What a destination is: a queue, or (NServiceBus's conventional routing) a fanout exchange before a queue of its name.
Routing = Literal["direct", "conventional"]
#: Which headers tell of the delay: ours alone, or NServiceBus's too.
Headers = Literal["plain", "nservicebus"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The names, queue arguments, bindings, entry and headers of one delay topology.

    :param name: what a user chooses it by.
    :param level_prefix: a level's exchange and queue are both called this and the level's number.
    :param level_digits: how many digits that number has at least.
    :param delivery_exchange: topic exchange behind level 0, to which destinations are bound.
    :param arguments: of each level's queue, beside its time to live and its dead-letter exchange.
    :param unroutable: fanout exchange and queue that take what no destination took; None for a topology that others
        declare too, since an exchange with another argument would be refused to them. With at-least-once
        dead-lettering such a message else stays at the head of its level and blocks all others.
    """

    name: str
    level_prefix: str
    level_digits: int
    delivery_exchange: str
    arguments: Mapping[str, str | int]
    unroutable: str | None = None
    binding: Binding = "suffix"
    entry: Entry = "top-bit"
    routing: Routing = "direct"
    headers: Headers = "plain"

    def level_name(self, level: int) -> str:
        """Return the name of a level's exchange and of its queue."""
        return f"{self.level_prefix}{level:0{self.level_digits}d}"

    @property
    def unroutable_queue(self) -> str:
        """The exchange and queue for what is unroutable; where others declare the topology too, a policy leads there.

        Named as the delivery exchange is: ``nsb.v2.delay-unroutable``, ``celery_delayed_unroutable``. Only an install
        with ``unroutable_policy`` makes the latter kind.
        """
        if self.unroutable:
            return self.unroutable
        name = self.delivery_exchange.removesuffix("delivery")
        return f"{name}unroutable" if name != self.delivery_exchange else f"{name}.unroutable"

    @property
    def is_quorum(self) -> bool:
        """Whether the levels' queues are quorum queues."""
        return self.arguments.get("x-queue-type") == "quorum"

    @property
    def keeps_stuck(self) -> bool:
        """Whether a level keeps what cannot move on (at-least-once dead-lettering); else such a message is lost."""
        return self.arguments.get("x-dead-letter-strategy") == "at-least-once"

    def queue_arguments(self, level: int) -> dict[str, str | int]:
        """Return the arguments of a level's queue; its time to live, in milliseconds, is what makes the delay.

        There is no dead-letter routing key: a message keeps its own.
        """
        return {
            **self.arguments,
            "x-message-ttl": (1 << level) * 1000,
            "x-dead-letter-exchange": self.level_name(level - 1) if level else self.delivery_exchange,
        }

    def entry_exchange(self, delay_seconds: int) -> str:
        """Return the exchange at which a message enters that cannot go into a level's queue directly.

        :raises LimitExceeded: the delay is beyond its limit.
        """
        return self.level_name(levels.TOP_LEVEL if self.entry == "top-level" else levels.entry_level(delay_seconds))

    def check_destination(self, destination: str) -> None:
        """Check that a destination can be one of this topology.

        :raises LimitExceeded: it is longer than 199 UTF-8 bytes, has an empty word, a word that is ``*`` or ``#``, or
            is a part of the topology itself.
        """
        levels.check_destination(destination)
        if destination in (self.unroutable_queue, self.delivery_exchange) or destination.startswith(self.level_prefix):
            raise LimitExceeded(
                "destination", f"{destination!r} is a part of the delay levels themselves; choose another"
            )

    def binding_key(self, destination: str) -> str:
        """Return the key that binds a destination to the delivery exchange.

        Exact: for any delay and this destination alone. Suffix, as NServiceBus and kombu bind: it also takes the
        messages for ``other.destination``.

        :raises LimitExceeded: the destination is beyond its limit.
        """
        self.check_destination(destination)
        return ("*." * levels.BITS if self.binding == "exact" else "#.") + destination

    def leaks(self, destinations: Iterable[str]) -> tuple[tuple[str, str], ...]:
        """Return each pair of destinations of which the first also gets delayed messages for the second.

        ``Sales`` gets all for ``Acme.Sales``. A name that begins like a delay's bits leaks the other way: ``0.Sales``
        gets those for ``Sales`` whose delay is even.
        """
        if self.binding == "exact":
            return ()
        pairs = permutations(dict.fromkeys(destinations), 2)
        return tuple((one, other) for one, other in pairs if other.endswith("." + one) or _is_bits_of(one, other))

    @property
    def pattern(self) -> str:
        """A pattern for the names of its parts, as RabbitMQ's permissions have them."""
        names = (self.level_prefix, self.delivery_exchange, self.unroutable_queue)
        return f"^({'|'.join(name.replace('.', '[.]') for name in names)})"


def _is_bits_of(one: str, other: str) -> bool:
    head = one.removesuffix("." + other)
    bits = head.split(".")
    return head != one and len(bits) <= levels.BITS and set(bits) <= {"0", "1"}


_QUORUM = {"x-queue-type": "quorum", "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}

#: Ours, the default: nobody else declares it, so destinations are bound exactly and nothing unroutable gets lost.
DELAYED = Topology(
    name="delayed",
    level_prefix="delayed.level-",
    level_digits=2,
    delivery_exchange="delayed.delivery",
    arguments=_QUORUM,
    unroutable="delayed.unroutable",
    binding="exact",
    entry="direct",
)
#: NServiceBus.RabbitMQ 7 and later (DelayInfrastructure.cs).
NSERVICEBUS = Topology(
    name="nservicebus",
    level_prefix="nsb.v2.delay-level-",
    level_digits=2,
    delivery_exchange="nsb.v2.delay-delivery",
    arguments=_QUORUM,
    routing="conventional",
    headers="nservicebus",
)
#: NServiceBus.RabbitMQ 4.3 to 6: classic queues, which can lose messages at a fail-over.
NSERVICEBUS_V1 = replace(
    NSERVICEBUS,
    name="nservicebus-v1",
    level_prefix="nsb.delay-level-",
    delivery_exchange="nsb.delay-delivery",
    arguments={"x-queue-mode": "lazy"},
)
#: Celery's native delayed delivery (kombu's native_delayed_delivery.py), as it declares it with quorum queues.
CELERY = Topology(
    name="celery",
    level_prefix="celery_delayed_",
    level_digits=1,
    delivery_exchange="celery_delayed_delivery",
    arguments=_QUORUM,
)
#: The same with ``broker_native_delayed_delivery_queue_type = "classic"``.
CELERY_CLASSIC = replace(
    CELERY, name="celery-classic", arguments={"x-queue-type": "classic", "x-overflow": "reject-publish"}
)

TOPOLOGIES: Mapping[str, Topology] = {
    topology.name: topology for topology in (DELAYED, NSERVICEBUS, NSERVICEBUS_V1, CELERY, CELERY_CLASSIC)
}


def topology_of(choice: Topology | str, routing: str | None = None) -> Topology:
    """Return the topology a user chose.

    :param choice: the value itself or its name.
    :param routing: ``conventional`` (the default) or ``direct``, as the NServiceBus endpoints have it.
    :raises ValueError: there is none of that name, or it has no such routing.
    """
    if isinstance(choice, str):
        if choice not in TOPOLOGIES:
            raise ValueError(f"topology {choice!r} is unknown; use one of {', '.join(TOPOLOGIES)}")
        choice = TOPOLOGIES[choice]
    if routing in (None, "", choice.routing):
        return choice
    if choice.headers == "nservicebus":
        for known in get_args(Routing):
            if routing == known:
                return replace(choice, routing=known)
    raise ValueError(
        f"topology {choice.name!r} has no routing {routing!r}; 'conventional' and 'direct' are NServiceBus's, the"
        " others have 'direct' alone"
    )
