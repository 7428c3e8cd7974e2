"""How a dispatcher goes about its work: all that may be chosen, with what is taken by default."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from fnmatch import fnmatchcase
from math import inf
from typing import Any, Literal

from airflow_delayed.errors import some

_HALF_A_MINUTE = timedelta(seconds=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchPolicy:
    """What may be chosen of a dispatcher; the names of retries and breakers are NServiceBus's (MSMQ transport).

    :param lookahead: how long before its due time a message is handed over.
    :param batch_size: messages that are claimed at a time, for each connection; if sending them goes fast, up to ten
        times as many in one transaction.
    :param consistency: "exactly_once" allows no connection but the store's own, whose destinations are queue tables in
        the same database.
    :param number_of_retries: how often a message is tried again that its transport refused, so one attempt more than
        this in all. (NServiceBus makes two more, for it reads its count before it adds to it.) What trying again
        cannot mend is given up at once: a destination that does not exist, a limit of the transport, a row that cannot
        be read. A lost connection is no attempt.
    :param error_destination: gets what is given up, through the same connection, at once, with the reason in its
        headers. Without it, or if that fails too, it goes to the table of failed messages.
    :param time_to_trigger_store_circuit_breaker: how long writing to the store may fail, until the run ends.
    :param time_to_trigger_fetch_circuit_breaker: how long claiming may fail, until the run ends.
    :param time_to_trigger_dispatch_circuit_breaker: how long a connection may fail, until it is left alone for the
        rest of the run, and the run ends when what is due on the others is handed over.
    :param maximum_recovery_failures_per_second: how often noting a failure, or sending to the error destination, may
        fail, over 30 seconds.
    :param max_rate: messages a second at most; None: no limit.
    :param remember: how long ids are remembered that were handed over or cancelled.
    :param claim_timeout: how long messages are held for a dispatcher that does not answer any more.
    :param allowed_destinations: names of destinations, or patterns with ``*``, ``?`` and ``[...]``; a message to
        another one is given up with the reason, before anything of it is sent. None: all destinations. What is given
        up goes to ``error_destination`` whether that is among them or not.
    :raises ValueError: one of them cannot be; the error names it.
    """

    lookahead: timedelta = timedelta(minutes=15)
    batch_size: int = 500
    consistency: Literal["at_least_once", "exactly_once"] = "at_least_once"
    number_of_retries: int = 7
    error_destination: str | None = None
    time_to_trigger_store_circuit_breaker: timedelta = _HALF_A_MINUTE
    time_to_trigger_fetch_circuit_breaker: timedelta = _HALF_A_MINUTE
    time_to_trigger_dispatch_circuit_breaker: timedelta = _HALF_A_MINUTE
    maximum_recovery_failures_per_second: float = 1
    max_rate: float | None = None
    remember: timedelta = timedelta(days=14)
    claim_timeout: timedelta = _HALF_A_MINUTE
    allowed_destinations: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.lookahead < timedelta(0):
            raise ValueError(
                f"lookahead={self.lookahead} is negative: messages would be handed over after their due time"
            )
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size} must be 1 or more")
        if self.consistency not in ("at_least_once", "exactly_once"):
            raise ValueError(f"consistency={self.consistency!r} must be 'at_least_once' or 'exactly_once'")
        if self.number_of_retries < 0:
            raise ValueError(f"number_of_retries={self.number_of_retries} must be 0 or more")
        for name in ("store", "fetch", "dispatch"):
            span = getattr(self, f"time_to_trigger_{name}_circuit_breaker")
            if span < timedelta(0):
                raise ValueError(f"time_to_trigger_{name}_circuit_breaker={span} must not be negative")
        if not self.maximum_recovery_failures_per_second > 0:
            raise ValueError(
                f"maximum_recovery_failures_per_second={self.maximum_recovery_failures_per_second} must be more than 0"
            )
        if self.max_rate is not None and not 0 < self.max_rate < inf:
            raise ValueError(f"max_rate={self.max_rate} must be more than 0 messages a second, and finite, or None")
        if self.remember < timedelta(0):
            raise ValueError(f"remember={self.remember} must not be negative")
        if self.claim_timeout < timedelta(seconds=1):
            raise ValueError(f"claim_timeout={self.claim_timeout} must be a second or more")
        if self.error_destination == "":
            raise ValueError("error_destination is empty; name a destination, or leave it out")
        self._check_destinations()

    def _check_destinations(self) -> None:
        if isinstance(self.allowed_destinations, str):
            object.__setattr__(self, "allowed_destinations", [self.allowed_destinations])
        if self.allowed_destinations is not None and not all(self.allowed_destinations or [""]):
            raise ValueError(
                "allowed_destinations is empty, or has an empty name: nothing could be handed over; name destinations"
                " or patterns, or leave it out to allow all"
            )

    def refused(self, destinations: Iterable[str]) -> dict[str, str]:
        """Return those that ``allowed_destinations`` does not name, each with the reason."""
        if (allowed := self.allowed_destinations) is None:
            return {}
        return {
            one: f"destination {one!r} is not among the allowed_destinations of the dispatcher: {some(allowed)}"
            for one in set(destinations)
            if one not in allowed and not any(fnmatchcase(one, pattern) for pattern in allowed)
        }

    @classmethod
    def of(cls, attributes: Mapping[str, Any]) -> DispatchPolicy:
        """Return the policy among an operator's attributes; the rest is as by default.

        :raises ValueError: one of them cannot be.
        """
        return cls(**{each.name: attributes[each.name] for each in fields(cls) if each.name in attributes})

    def state(self) -> dict[str, Any]:
        """Return it as JSON can hold it; times in seconds."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            name: value.total_seconds() if isinstance(value, timedelta) else value for name, value in values.items()
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> DispatchPolicy:
        """Return the policy of a state. What is not in it is as by default, and what is not known is left out."""
        known = {each.name: each.default for each in fields(cls)}
        given: dict[str, Any] = {
            name: timedelta(seconds=value) if isinstance(known[name], timedelta) else value
            for name, value in state.items()
            if name in known
        }
        return cls(**given)
