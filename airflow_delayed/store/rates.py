"""The rates of destinations: how many messages a second all dispatchers together claim for each, at most.

The table ``_rates`` has a token bucket for each destination with a rate, whichever connection delivers. It fills by the
database's clock, and holds the tokens of one second, at least one. A dispatcher takes tokens in the transaction that
claims the messages. A dispatcher that is killed before it has sent them has taken its tokens nevertheless: so all
dispatchers together may be slower than the rate, and never faster.

A row does not have the number of tokens, but the time at which the bucket was empty (EmptyAt): what has come in since
then is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from sqlalchemy import Connection, Engine, delete, func, insert, select, update

from airflow_delayed.store.audit import AuditEntry
from airflow_delayed.store.database import slices
from airflow_delayed.store.dialects import database_time, dialect_of
from airflow_delayed.store.engine import retried
from airflow_delayed.store.policy import LEAST_RATE, MAX_DESTINATION, MOST_RATE
from airflow_delayed.store.records import delivered_by
from airflow_delayed.store.schema import Tables, UtcTime

#: After a pause, as many messages may be claimed at once as in so many seconds; at least one.
BURST_SECONDS = 1.0
#: A claim waits for the tokens of so many seconds, at least for one token: a claim for each token would cost too much.
PORTION_SECONDS = 0.1
#: The database's clock has been set back if a bucket was empty at a time that is further ahead than this.
CLOCK_SET_BACK = timedelta(seconds=1)
#: Seconds between two looks for rates while there are none.
_LOOK_EVERY = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DestinationRate:
    """The rate of a destination, with its bucket.

    :param first_due: the due time of the oldest message to it in the store; None: there is none.
    """

    destination: str
    per_second: float
    empty_at: datetime
    first_due: datetime | None = None

    def tokens(self, now: datetime) -> int:
        """Return how many messages may be claimed now; 0 if a claim is not worth while yet."""
        level = min(self._most, (now - self.empty_at).total_seconds() * self.per_second)
        return int(level) if level >= self._portion else 0

    def taken(self, count: int, now: datetime) -> DestinationRate:
        """Return the rate after so many tokens were taken."""
        start = max(self.empty_at, now - timedelta(seconds=self._most / self.per_second))
        # up to the next microsecond, so that rounding makes it slower
        empty_at = start + timedelta(seconds=count / self.per_second, microseconds=1)
        return replace(self, empty_at=empty_at)

    def is_throttled(self, now: datetime) -> bool:
        """Return whether a message is due that may not be claimed now."""
        return self.first_due is not None and self.first_due <= now and not self.tokens(now)

    def is_in_use(self, now: datetime) -> bool:
        """Return whether messages were claimed so lately that the bucket is not full again."""
        return (now - self.empty_at).total_seconds() * self.per_second < self._most

    @property
    def ready_at(self) -> datetime:
        """When messages may be claimed next; in the past if they may be claimed now."""
        return self.empty_at + timedelta(seconds=self._portion / self.per_second, microseconds=1)

    @property
    def _most(self) -> float:
        return max(1.0, self.per_second * BURST_SECONDS)

    @property
    def _portion(self) -> float:
        return max(1.0, self.per_second * PORTION_SECONDS)


class RateReader:
    """Reads the rates for a dispatcher; while there are none, every :data:`_LOOK_EVERY` seconds."""

    def __init__(self, tables: Tables, monotonic: Callable[[], float]) -> None:
        self._tables = tables
        self._monotonic = monotonic
        self._none_until: float | None = None

    def read(self, connection: Connection, deliver_conn_id: str | None) -> Sequence[DestinationRate]:
        """Return the rates, each with the oldest message of this connection; None: of the queue tables."""
        if self._none_until is not None and self._monotonic() < self._none_until:
            return ()
        found = read_due(connection, self._tables, deliver_conn_id)
        self._none_until = None if found else self._monotonic() + _LOOK_EVERY
        return found


def read(connection: Connection, tables: Tables) -> Sequence[DestinationRate]:
    """Return all rates by destination, without their oldest messages."""
    table = tables.rates
    statement = select(table.c.Destination, table.c.Rate, table.c.EmptyAt).order_by(table.c.Destination)
    return [
        DestinationRate(destination=destination, per_second=rate, empty_at=empty_at)
        for destination, rate, empty_at in connection.execute(statement)
    ]


def read_due(connection: Connection, tables: Tables, deliver_conn_id: str | None) -> Sequence[DestinationRate]:
    """Return all rates by destination, each with the oldest message of this connection; None: of the queue tables."""
    table, messages = tables.rates, tables.messages
    ours = delivered_by(messages, deliver_conn_id), messages.c.Destination == table.c.Destination
    first = select(func.min(messages.c.Time, type_=UtcTime())).where(*ours).correlate(table).scalar_subquery()
    statement = select(table.c.Destination, table.c.Rate, table.c.EmptyAt, first).order_by(table.c.Destination)
    return [
        DestinationRate(destination=destination, per_second=rate, empty_at=empty_at, first_due=first_due)
        for destination, rate, empty_at, first_due in connection.execute(statement)
    ]


def lock(
    connection: Connection, tables: Tables, rates: Sequence[DestinationRate], now: datetime
) -> dict[str, DestinationRate]:
    """Lock the buckets that have tokens, until the transaction ends, and return them as they are now, by destination.

    A bucket from which another dispatcher is just taking is left out.

    :param now: the database's time, of this transaction.
    """
    wanted = {one.destination: one for one in rates if one.tokens(now) or one.empty_at > now + CLOCK_SET_BACK}
    table, dialect, locked = tables.rates, dialect_of(connection), {}
    for names in slices(sorted(wanted)):
        rows = select(table.c.Destination, table.c.Rate, table.c.EmptyAt).where(table.c.Destination.in_(names))
        statement = dialect.by_key(rows.with_for_update(skip_locked=True), table)
        for name, rate, empty_at in connection.execute(statement.order_by(table.c.Destination)):
            locked[name] = replace(wanted[name], per_second=rate, empty_at=empty_at)
    return locked


def write(connection: Connection, tables: Tables, rate: DestinationRate) -> None:
    """Write a bucket that this transaction has locked."""
    table = tables.rates
    statement = update(table).where(table.c.Destination == rate.destination)
    connection.execute(statement.values(EmptyAt=rate.empty_at))


def check(rates: Mapping[str, float | None]) -> None:
    """Check rates before they are written.

    :raises ValueError: a name or a number is not allowed; the error names it.
    """
    for destination, rate in rates.items():
        if not 0 < len(destination) <= MAX_DESTINATION or "\0" in destination:
            raise ValueError(
                f"destination {destination!r}: a name must have 1 to {MAX_DESTINATION} characters, without null"
            )
        if rate is not None and not LEAST_RATE <= rate <= MOST_RATE:
            raise ValueError(
                f"the rate {rate} of destination {destination!r} must be from {LEAST_RATE:f} to {MOST_RATE:,.0f}"
                " messages a second, or None for no limit"
            )


def change(
    engine: Engine,
    tables: Tables,
    rates: Mapping[str, float | None],
    *,
    who: str,
    because: str | None = None,
) -> None:
    """Set the rates of these destinations, and record that in the audit; None removes a rate. A new bucket is empty."""
    table, entry = tables.rates, AuditEntry(who, "rates", {"rates": dict(rates)}, because=because)

    def work(connection: Connection) -> None:
        now = database_time(connection)
        for destination, rate in sorted(rates.items()):
            same = table.c.Destination == destination
            if rate is None:
                connection.execute(delete(table).where(same))
            elif not connection.execute(update(table).where(same).values(Rate=rate)).rowcount:
                connection.execute(insert(table).values(Destination=destination, Rate=rate, EmptyAt=now))
        entry.write(connection, tables, {}, now)

    retried(engine, work)
