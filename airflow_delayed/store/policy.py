"""The parameters of a store and of its dispatcher, with their defaults and checks.

An operator's own parameter wins; for ``lookahead`` and ``remember`` the section ``[delayed]`` of Airflow's
configuration comes next (:mod:`airflow_delayed.config`); a dispatcher that code makes itself has that section's
defaults.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from airflow_delayed.errors import check_choice, some
from airflow_delayed.message import plain_span
from airflow_delayed.provider_info import LOOKAHEAD, REMEMBER

#: Characters of a destination that a store keeps.
MAX_DESTINATION = 200
#: Bytes of a destination that is a table: PostgreSQL cuts longer names.
MAX_QUEUE_NAME = 63

#: The smallest and the largest rate, in messages a second: one in eleven days, and more than a database can claim.
LEAST_RATE, MOST_RATE = 1e-6, 1e6
#: The default of ``claim_timeout``, and the shortest lease of a store that implements the protocol.
LEASE = timedelta(seconds=30)
#: How long a part of the work may fail until its circuit breaker trips.
BREAKER_TIME = timedelta(seconds=30)
#: What has a circuit breaker: writing to the store, claiming, and sending through a connection.
_BREAKERS = ("store", "fetch", "dispatch")

#: How a store treats a message whose id it knows with other content.
OnConflict = Literal["error", "keep", "replace"]


def check_on_conflict(value: str) -> OnConflict:
    """Return the value if it is an :data:`OnConflict`."""
    check_choice("on_conflict", value, get_args(OnConflict))
    return value  # type: ignore[return-value]


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchPolicy:
    """The parameters of a dispatcher; the names of retries and breakers are NServiceBus's (MSMQ transport).

    :param lookahead: how long before its due time a message is dispatched. "auto": at its due time by a dispatcher that
        stays, for a transport whose messages arrive sooner so (RabbitMQ); else ``auto_lookahead`` before.
    :param auto_lookahead: how far ahead "auto" dispatches where it does. The default is that of the option
        ``[delayed] lookahead``.
    :param batch_size: how many messages a worker claims at a time for its connection; where sending is fast, it claims
        up to ten times as many in one transaction.
    :param number_of_retries: how often the dispatcher retries a message that its transport refused; the number of
        attempts is one more. (NServiceBus makes two more, because it reads its count before it increments it.) Errors
        that a retry cannot cure are given up at once: a missing destination, a limit of the transport, an unreadable
        row. A lost connection is no attempt.
    :param error_destination: receives messages that are given up, through the same connection, with the reason in
        their headers. Without it, or if that fails too, they go to the table of failed messages.
    :param time_to_trigger_store_circuit_breaker: how long writing to the store may fail, until the run ends.
    :param time_to_trigger_fetch_circuit_breaker: how long claiming may fail, until the run ends.
    :param time_to_trigger_dispatch_circuit_breaker: how long a connection may fail before the run no longer uses it;
        the run then ends when the due messages of the other connections are dispatched.
    :param maximum_recovery_failures_per_second: how often it may fail to record a failure, or to send to the error
        destination, a second on average over 30 seconds.
    :param max_rate: the most messages a second; None: no limit.
    :param remember: how long the store remembers the ids of delivered and cancelled messages.
    :param claim_timeout: the length of a lease: when the messages of a dispatcher that was killed are free again.
    :param allowed_destinations: names of destinations, or patterns with ``*``, ``?`` and ``[...]``; a message to any
        other destination is given up with the reason, before anything of it is sent. None: all destinations.
        ``error_destination`` need not be among them.
    :raises ValueError: a value is not allowed; the error names the parameter.
    """

    lookahead: timedelta | Literal["auto"] = "auto"
    auto_lookahead: timedelta = timedelta(seconds=LOOKAHEAD)
    batch_size: int = 500
    number_of_retries: int = 7
    error_destination: str | None = None
    time_to_trigger_store_circuit_breaker: timedelta = BREAKER_TIME
    time_to_trigger_fetch_circuit_breaker: timedelta = BREAKER_TIME
    time_to_trigger_dispatch_circuit_breaker: timedelta = BREAKER_TIME
    maximum_recovery_failures_per_second: float = 1
    max_rate: float | None = None
    remember: timedelta = timedelta(seconds=REMEMBER)
    claim_timeout: timedelta = LEASE
    allowed_destinations: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            if isinstance(span := getattr(self, each.name), timedelta):
                object.__setattr__(self, each.name, plain_span(each.name, span))
        self._check_lookahead()
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size} must be 1 or more")
        if self.number_of_retries < 0:
            raise ValueError(f"number_of_retries={self.number_of_retries} must be 0 or more")
        for name in _BREAKERS:
            span = getattr(self, f"time_to_trigger_{name}_circuit_breaker")
            if span < timedelta(0):
                raise ValueError(f"time_to_trigger_{name}_circuit_breaker={span} must not be negative")
        if not self.maximum_recovery_failures_per_second > 0:
            raise ValueError(
                f"maximum_recovery_failures_per_second={self.maximum_recovery_failures_per_second} must be more than 0"
            )
        if self.max_rate is not None and not LEAST_RATE <= self.max_rate <= MOST_RATE:
            raise ValueError(
                f"max_rate={self.max_rate} must be from {LEAST_RATE:f} to {MOST_RATE:,.0f} messages a second, or None"
                " for no limit"
            )
        if self.remember < timedelta(0):
            raise ValueError(f"remember={self.remember} must not be negative")
        if self.claim_timeout < timedelta(seconds=1):
            raise ValueError(f"claim_timeout={self.claim_timeout} must be a second or more")
        if self.error_destination == "":
            raise ValueError("error_destination is empty; name a destination, or leave it out")
        self._check_destinations()

    def _check_lookahead(self) -> None:
        if not isinstance(self.lookahead, timedelta) and self.lookahead != "auto":
            raise ValueError(f"lookahead={self.lookahead!r} must be a timedelta or 'auto'")
        if self.farthest < timedelta(0):
            raise ValueError(
                f"lookahead={self.farthest} is negative: messages would be dispatched after their due time"
            )

    @property
    def farthest(self) -> timedelta:
        """How long before its due time a message is dispatched at most."""
        return self.lookahead if isinstance(self.lookahead, timedelta) else self.auto_lookahead

    def _check_destinations(self) -> None:
        if isinstance(self.allowed_destinations, str):
            object.__setattr__(self, "allowed_destinations", [self.allowed_destinations])
        if self.allowed_destinations is not None and not all(self.allowed_destinations or [""]):
            raise ValueError(
                "allowed_destinations is empty, or has an empty name: nothing could be dispatched; name destinations"
                " or patterns, or leave it out to allow all"
            )

    def refused(self, destinations: Iterable[str]) -> dict[str, str]:
        """Return the destinations that ``allowed_destinations`` does not allow, each with the reason."""
        if (allowed := self.allowed_destinations) is None:
            return {}
        return {
            one: f"destination {one!r} is not among the allowed_destinations of the dispatcher: {some(allowed)}"
            for one in set(destinations)
            if one not in allowed and not any(fnmatchcase(one, pattern) for pattern in allowed)
        }

    @classmethod
    def of(cls, attributes: Mapping[str, Any]) -> DispatchPolicy:
        """Return the policy from an operator's attributes, among them ``give_up_after``; missing ones have defaults."""
        values = {each.name: attributes[each.name] for each in fields(cls) if each.name in attributes}
        values |= breaker_times(attributes.get("give_up_after", BREAKER_TIME))
        return cls(**values)

    def state(self) -> dict[str, Any]:
        """Return the parameters as JSON values; durations in seconds."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            name: value.total_seconds() if isinstance(value, timedelta) else value for name, value in values.items()
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> DispatchPolicy:
        """Return the policy of a state. Missing parameters have their defaults; unknown ones are ignored."""
        known = {each.name: each.default for each in fields(cls)}
        given: dict[str, Any] = {
            name: timedelta(seconds=value)
            if isinstance(known[name], timedelta) or (name == "lookahead" and value != "auto")
            else value
            for name, value in state.items()
            if name in known
        }
        return cls(**given)


def breaker_times(give_up_after: timedelta) -> dict[str, timedelta]:
    """Return the parameters of a policy whose three breakers trip after the same time."""
    if give_up_after < timedelta(0):
        raise ValueError(f"give_up_after={give_up_after} must not be negative")
    return dict.fromkeys((f"time_to_trigger_{name}_circuit_breaker" for name in _BREAKERS), give_up_after)


def check_connections(deliver_conn_ids: Sequence[str]) -> None:
    """Check the connections that a dispatcher may deliver through."""
    if not deliver_conn_ids:
        raise ValueError("deliver_conn_ids is empty: name the connections that may deliver")
