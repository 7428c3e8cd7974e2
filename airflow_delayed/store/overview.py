"""What an operator sees at a glance: bounded counts, failures by cause, and a search by the beginning of a text.

Each answer reads a bounded number of rows, by an index, however many messages the store has. No Airflow here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from sqlalchemy import Column, Connection, func, or_, select
from typing_extensions import Unpack

from airflow_delayed.delivery import Finding
from airflow_delayed.identity import typed_key_ids
from airflow_delayed.store import counts, pauses, queries
from airflow_delayed.store.counts import DispatcherSeen
from airflow_delayed.store.dialects import database_time, dialect_of
from airflow_delayed.store.dispatch import report
from airflow_delayed.store.filters import BOTH, FilterArgs, MessageFilter, MessageState, filter_of, moments
from airflow_delayed.store.forecast import Forecast, forecasts
from airflow_delayed.store.history import Timeline, timeline
from airflow_delayed.store.leases import FIRST_ID
from airflow_delayed.store.pauses import holds_of, not_held
from airflow_delayed.store.queries import DeliveredMessage
from airflow_delayed.store.transport import StoreTransport

#: Failed messages that are looked at, the first by due time.
_MAX_FAILURES = 10_000
#: Groups of failures that are returned, the largest ones.
MAX_GROUPS = 50
#: Values of one field that a search returns.
MAX_MATCHES = 5
#: No text that begins with another comes behind that other one with this character.
_LAST = "\U0010ffff"

SearchField = Literal["id", "tag", "destination", "dag_id"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureGroup:
    """Failed messages of one cause and destination."""

    reason: str | None
    destination: str
    #: None: a queue table in the store's database.
    deliver_conn_id: str | None
    count: int
    #: The first of them, by id.
    first_id: str
    #: When the last of them failed.
    latest: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchMatch:
    """A value of a field that is the text of a search, or begins with it; or an id whose key is that text."""

    field: SearchField
    value: str
    exact: bool


class StoreOverview(StoreTransport):
    """The short answers of a store, see :class:`airflow_delayed.store.api.Store`."""

    def next_due(self) -> datetime | None:
        """Return when the next of the messages that are not due yet falls due; None: there is none."""
        time = self.tables.messages.c.Time
        with self._ready(), dialect_of(self.engine).read_only(self.engine) as connection:
            soonest: datetime | None = connection.execute(
                select(func.min(time)).where(time > database_time(connection))
            ).scalar_one()
        return soonest

    def oldest_due_seconds(self) -> float:
        """Return for how long the message has been due that was due first, and is not paused; 0: there is none."""
        messages = self.tables.messages.c
        with self._ready(), dialect_of(self.engine).read_only(self.engine) as connection:
            now = database_time(connection)
            free = not_held(self.tables, holds_of(pauses.read(connection, self.tables), now))
            alive = or_(messages.ExpiresAt.is_(None), messages.ExpiresAt > now)
            # not a minimum, whose plan might be to read all messages
            first = select(messages.Time).where(messages.Time <= now, alive, *free).order_by(messages.Time).limit(1)
            oldest: datetime | None = connection.execute(first).scalar_one_or_none()
        return 0.0 if oldest is None else (now - oldest).total_seconds()

    def matching(self, limit: int, **filters: Unpack[FilterArgs]) -> int:
        """Count the messages that match a filter, failed ones too, up to a limit."""
        wanted = self._filter(filters)
        with self._ready(), dialect_of(self.engine).read_only(self.engine) as connection:
            values, counted = moments(database_time(connection)), 0
            for where in BOTH:
                table = getattr(self.tables, where)
                conditions = wanted.conditions(self.tables, where)
                if conditions is not None and counted < limit:
                    some = select(table.c.Id).where(*conditions).limit(limit - counted).subquery()
                    counted += int(connection.execute(select(func.count()).select_from(some), values).scalar_one())
        return counted

    def by_state(self, **filters: Unpack[FilterArgs]) -> tuple[Mapping[str, int], bool]:
        """Count the messages that match a filter without states, by state; see :func:`counts.by_state`."""
        with self._ready():
            return counts.by_state(self.engine, self.tables, self._filter(filters))

    def failures(self) -> tuple[Sequence[FailureGroup], bool]:
        """Group the failed messages by cause; the largest group is first.

        :return: up to 50 groups, and whether there are more than the 10,000 messages that were looked at.
        """
        failed = self.tables.failed
        columns = (failed.c.LastError, failed.c.Destination, failed.c.DeliverConnId, failed.c.Id, failed.c.FailedAt)
        look = select(*columns, failed.c.Reason).order_by(failed.c.Time, failed.c.Id).limit(_MAX_FAILURES).subquery()
        by = (look.c.LastError, look.c.Destination, look.c.DeliverConnId)
        count = func.count().label("many")
        groups = (
            select(*by, count, func.min(look.c.Id).label("first"), func.max(look.c.FailedAt).label("latest"))
            .where(look.c.Reason == MessageState.FAILED.value)
            .group_by(*by)
            .order_by(count.desc(), func.min(look.c.Id))
            .limit(MAX_GROUPS)
        )
        with self._ready(), dialect_of(self.engine).read_only(self.engine) as connection:
            found = [
                FailureGroup(
                    reason=row.LastError,
                    destination=row.Destination,
                    deliver_conn_id=row.DeliverConnId,
                    count=int(row.many),
                    first_id=row.first,
                    latest=row.latest,
                )
                for row in connection.execute(groups)
            ]
            looked_at = connection.execute(select(func.count()).select_from(look)).scalar_one()
        return found, len(found) == MAX_GROUPS or looked_at == _MAX_FAILURES

    def search(self, text: str) -> Sequence[SearchMatch]:
        """Return up to five ids, tags, destinations and DAGs each that begin with a text, an exact one first.

        Texts are compared byte by byte. The ids are those of messages in the store, and remembered ones. A key such as
        ``order_id=1001`` is the ids that :func:`airflow_delayed.identity.typed_key_ids` makes of it.
        """
        messages, failed, past = self.tables.messages, self.tables.failed, self.tables.past
        searched: dict[SearchField, Sequence[Column[Any]]] = {
            "id": (messages.c.Id, failed.c.Id, past.c.Id),
            "tag": (messages.c.Tag, failed.c.Tag),
            "destination": (messages.c.Destination, failed.c.Destination),
            "dag_id": (self.tables.runs.c.DagId,),
        }
        keys = self.ids_of(text)
        found = [SearchMatch(field="id", value=one, exact=True) for one in keys[:MAX_MATCHES]]
        with self._ready(), dialect_of(self.engine).read_only(self.engine) as connection:
            for field, columns in searched.items():
                values = sorted({value for column in columns for value in _beginning_with(connection, column, text)})
                found += [SearchMatch(field=field, value=one, exact=one == text) for one in values[:MAX_MATCHES]]
        return found

    def ids_of(self, key: str) -> Sequence[str]:
        """Return the ids that the store knows of a key such as ``order_id=1001``: the values of ``id_columns``."""
        ids = typed_key_ids(key)
        there = self.known(ids) if ids else ()
        return [one for one in ids if one in there]

    def last_dispatched(self) -> DeliveredMessage | None:
        """Return the message that was dispatched last; None: none is remembered."""
        with self._ready():
            return queries.last_delivered(self.engine, self.tables)

    def dispatchers(self) -> Sequence[DispatcherSeen]:
        """Return the runs of dispatchers of the last day, up to a thousand, the one seen last first."""
        with self._ready():
            return counts.dispatchers(self.engine, self.tables)

    def lookaheads(self, *, at_end: bool = True) -> Mapping[str, timedelta]:
        """Return by connection how long before its due time a dispatcher takes a message, so that it stays no longer.

        It is the longest of the dispatchers of the last day; a connection that no dispatcher delivers for is missing.
        The store's own connection stands for its queue tables.

        :param at_end: with what a dispatcher that stays hands over ahead at its end.
        """
        with self._reading() as connection:
            self._check_version()
            found = report.lookaheads(connection, self.tables, at_end=at_end)
        return {self.conn_id if name is None else name: ahead for name, ahead in found.items()}

    def staying(self) -> set[str]:
        """Return the connections, not the store's own, for which a dispatcher is at work that stays."""
        with self._reading() as connection:
            self._check_version()
            return report.staying(connection, self.tables, database_time(connection), but="")

    def timeline(self, seconds: int = 3600) -> Timeline:
        """Return what was dispatched in the last hour, day or week, and what falls due in the next.

        The past is what dispatchers wrote, each every 10 s: minutes of a day, hours of 14 days. The future reads the
        messages that fall due within that time.

        :raises ValueError: ``seconds`` is none of 3600, 86400 and 604800.
        """
        with self._ready():
            return timeline(self.engine, self.tables, seconds)

    def forecast(self, until: datetime | None = None) -> Sequence[Forecast]:
        """Return the messages that will be more than a minute late, as if all connections and a dispatcher worked.

        It goes by what falls due per minute, and the speed of each connection: the lowest of what was measured in the
        last 14 days, of the dispatchers' ``max_rate`` and of a destination's rate. It reads the messages that fall due
        until then: some seconds for ten million.

        :param until: at most 31 days ahead; None: a day ahead.
        """
        with self._ready():
            return forecasts(self.engine, self.tables, self.conn_id, until)

    def forecast_findings(self, until: datetime) -> Sequence[Finding]:
        """Return the forecast of the connection that delivers what this stores, as findings."""
        delivers = self.deliver_conn_id or self.conn_id
        return [one.finding(self.conn_id) for one in self.forecast(until) if one.conn_id == delivers]

    def _filter(self, filters: FilterArgs) -> MessageFilter:
        return filter_of(filters, own_conn_id=self.conn_id)


def _beginning_with(connection: Connection, column: Column[Any], text: str) -> list[str]:
    """Return the first different values of a column that begin with a text.

    Each value is one step in the column's index: DISTINCT would read all rows of a destination.
    """
    found: list[str] = []
    # the table of remembered ids has marks too, before all ids
    behind = column >= (max(text, FIRST_ID) if column.name == "Id" else text)
    while len(found) < MAX_MATCHES:
        statement = select(column).where(behind, column < text + _LAST).order_by(column).limit(1)
        value = connection.execute(statement).scalar()
        if value is None:
            break
        found.append(value)
        behind = column > value
    return found
