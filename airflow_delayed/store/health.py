"""Whether the messages of a store are dispatched in time; if not, what keeps them. No Airflow here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from shlex import quote

from sqlalchemy import ColumnElement, Engine, and_, exists, func, or_, select
from sqlalchemy import Connection as SqlConnection

from airflow_delayed.delivery import Finding, State
from airflow_delayed.errors import some
from airflow_delayed.identity import MISSED_RUN
from airflow_delayed.store import rates
from airflow_delayed.store.counts import DispatcherSeen, dispatchers
from airflow_delayed.store.dialects import database_time, dialect_of
from airflow_delayed.store.dispatch.report import DISPATCHER_SILENT, LEASES_LOST, SENDING_FAILS
from airflow_delayed.store.network import ADVICE
from airflow_delayed.store.policy import LEASE
from airflow_delayed.store.queries import DatabaseTime
from airflow_delayed.store.rates import DestinationRate
from airflow_delayed.store.schema import Tables
from airflow_delayed.store.version import environment_difference, version_difference

#: A message that waits for longer than this after its due time is late, although dispatchers are at work, or ended in
#: good order and come again.
LATE_AFTER = timedelta(minutes=1)
#: Codes of findings that have a dispatcher's own text, which may name hosts, logins and other users' DAGs.
NAMES_HOSTS = frozenset({"lease-too-short", "connection-fails", "dispatcher-fails"})
#: The most rows that are counted; further ones make the count "at least".
_MOST = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class OverdueMessages:
    """The messages for one connection that could have been dispatched :data:`DISPATCHER_SILENT` ago, and were not."""

    #: None: the queue tables of the store's own database.
    deliver_conn_id: str | None
    #: At most 10,000 of all connections are counted.
    messages: int
    #: When the oldest was due, or was to be tried again.
    oldest: datetime
    #: The rate of their destination, which holds them back; None: no rate does.
    rate: DestinationRate | None = None


def health(
    engine: Engine,
    tables: Tables,
    conn_id: str,
    environment: str | None = None,
    *,
    database_time: DatabaseTime = database_time,
) -> list[Finding]:
    """Return what keeps messages of the store from being dispatched in time; nothing if all is well.

    :param conn_id: the store's name, which stands for its queue tables.
    :param environment: the name of this host's environment.
    """
    with dialect_of(engine).read_only(engine) as connection:
        now = database_time(connection)
        late = overdue(connection, tables, now)
        waits = connection.execute(select(tables.messages.c.DeliverConnId).limit(1)).first()
        failed = _failed(connection, tables)
        recorded = (
            environment_difference(connection, tables, conn_id, environment),
            version_difference(connection, tables, conn_id),
        )
        watched = _missed_runs(connection, tables)
    seen = dispatchers(engine, tables)
    return [
        *judge(conn_id, late, seen, now),
        *_in_trouble(conn_id, seen),
        *_never_seen(conn_id, None if late or waits is None else waits.DeliverConnId or conn_id, seen),
        *_without_service(conn_id, watched, seen),
        *_of_failed(conn_id, failed),
        *(one for one in recorded if one is not None),
    ]


def overdue(connection: SqlConnection, tables: Tables, now: datetime) -> list[OverdueMessages]:
    """Count the overdue messages by connection, except leased and expired messages.

    Messages that wait for the rate of their destination are counted by it. A rate whose bucket is full holds nothing
    back.
    """
    destination = tables.messages.c.Destination
    limits = {one.destination: one for one in rates.read(connection, tables) if one.is_in_use(now)}
    others = _overdue(connection, tables, now, *([destination.not_in(list(limits))] if limits else ()))
    throttled = [
        replace(late, rate=limit)
        for name, limit in limits.items()
        for late in _overdue(connection, tables, now, destination == name)
    ]
    return [*others, *throttled]


def _overdue(
    connection: SqlConnection, tables: Tables, now: datetime, *of_destinations: ColumnElement[bool]
) -> list[OverdueMessages]:
    table, past, latest = tables.messages, tables.past, now - DISPATCHER_SILENT
    leased = exists().where(past.c.Id == table.c.Id, past.c.ClaimedUntil > now)
    wanted = and_(
        *of_destinations,
        table.c.Time <= latest,
        or_(table.c.NextTry.is_(None), table.c.NextTry <= latest),
        or_(table.c.ExpiresAt.is_(None), table.c.ExpiresAt > now),
        ~leased,
    )
    since = func.coalesce(table.c.NextTry, table.c.Time, type_=table.c.Time.type).label("since")
    first = select(table.c.DeliverConnId, since).where(wanted).order_by(table.c.Time).limit(_MOST).subquery()
    name = first.c.DeliverConnId
    statement = select(name, func.count(), func.min(first.c.since, type_=table.c.Time.type)).group_by(name)
    return [
        OverdueMessages(deliver_conn_id=conn_id, messages=count, oldest=oldest)
        for conn_id, count, oldest in connection.execute(statement)
    ]


def judge(
    conn_id: str, late: Sequence[OverdueMessages], seen: Sequence[DispatcherSeen], now: datetime
) -> Iterator[Finding]:
    """Say of each connection with overdue messages whether a dispatcher is at work for it.

    :param seen: the dispatchers of the last day, the one seen last first.
    """
    at_work = [one for one in seen if one.at_work]
    for each in late:
        serving = [one for one in seen if each.deliver_conn_id in one.conn_ids]
        name = conn_id if each.deliver_conn_id is None else each.deliver_conn_id
        count = f"at least {each.messages:,}" if each.messages == _MOST else f"{each.messages:,}"
        condition = f"{count} overdue, the oldest since {_text(each.oldest)}"
        resource = f"messages of store {conn_id!r} for connection {name!r}"
        is_late = now - each.oldest > LATE_AFTER
        if any(one in at_work for one in serving):
            if is_late and each.rate is not None:
                yield _throttled(conn_id, each.rate, condition)
            elif is_late:
                yield Finding(
                    state=State.WARNING,
                    resource=resource,
                    found=f"{condition}, although a dispatcher is at work for it",
                    code="overdue",
                    remedy="look into the dispatcher's log for errors of this connection; if there is none, more falls"
                    " due than it sends: raise max_rate, or run another dispatcher beside it",
                )
        elif is_late or (serving and serving[0].ended_at is None):
            cause, remedy = _without_dispatcher(name, serving, at_work, seen, conn_id)
            yield Finding(
                state=State.BLOCKED,
                resource=resource,
                found=f"{condition}, and {cause}",
                code="no-dispatcher",
                remedy=remedy,
            )


def _throttled(conn_id: str, rate: DestinationRate, condition: str) -> Finding:
    return Finding(
        state=State.WARNING,
        resource=f"messages of store {conn_id!r} to destination {rate.destination!r}",
        found=f"{condition}: the rate of this destination, {rate.per_second:g} messages a second, holds them back",
        code="throttled",
        remedy="nothing, if they may wait: dispatchers send them at this rate. Else raise it: airflow delayed rates"
        f" --store-conn-id {quote(conn_id)} {quote(rate.destination)}=...",
    )


def _without_dispatcher(
    name: str,
    serving: Sequence[DispatcherSeen],
    at_work: Sequence[DispatcherSeen],
    seen: Sequence[DispatcherSeen],
    conn_id: str,
) -> tuple[str, str]:
    """Return why nothing is dispatched through a connection, and what to do."""
    start = (
        f"let a dispatcher with {name!r} in its deliver_conn_ids run: a StoreDispatchOperator, whose DAG may be paused"
        f" or failing, or: airflow delayed dispatcher --store-conn-id {quote(conn_id)} --deliver-conn-ids"
        f" {quote(name)}"
    )
    if serving and serving[0].ended_at is None:
        last = _text(serving[0].seen_at)
        return (
            f"its dispatcher gave its last sign of life at {last}: it was killed, it hangs, or it cannot write to the"
            " database",
            f"look into the log of that task; then {start}",
        )
    if at_work:
        return f"the dispatchers at work deliver through {_names(at_work, conn_id)} alone", start
    if serving and serving[0].ended_at is not None:
        return f"no dispatcher has been at work for it since {_text(serving[0].ended_at)}", start
    others = f"; the last dispatchers delivered through {_names(seen, conn_id)}" if seen else ""
    return f"no dispatcher was at work for it within a day{others}", start


def _names(dispatchers: Sequence[DispatcherSeen], conn_id: str) -> str:
    names = {conn_id if one is None else one for each in dispatchers for one in each.conn_ids}
    return some(sorted(names), separator=", ")


def _in_trouble(conn_id: str, seen: Sequence[DispatcherSeen]) -> Iterator[Finding]:
    """Report the dispatchers at work that cannot do it, by what they wrote with their last sign of life."""
    for one in seen:
        if one.problem is None or not one.at_work:
            continue
        resource = f"dispatcher {one.dispatcher} of store {conn_id!r}"
        if one.problem.startswith(LEASES_LOST):
            yield Finding(
                state=State.WARNING,
                resource=resource,
                found=one.problem,
                code="lease-too-short",
                remedy=f"raise the dispatcher's claim_timeout ({LEASE.total_seconds():g} s by default) above the"
                " longest time that a batch takes, or lower batch_size, and look whether its machine stands still at"
                " times; messages whose leases end are sent again",
            )
        elif one.problem.startswith(SENDING_FAILS):
            yield Finding(
                state=State.BLOCKED,
                resource=resource,
                found=f"{one.problem}; messages wait, and none of their tries is counted",
                code="connection-fails",
                remedy=f"look whether the broker can be reached from {one.host or 'its machine'}, and takes its login;"
                " the dispatcher's log has the error, and it goes on by itself, or in its next run",
            )
        else:
            since = "yet" if one.worked_at is None else f"since {_text(one.worked_at)}"
            yield Finding(
                state=State.BLOCKED,
                resource=resource,
                found=f"it is at work, and has achieved nothing {since}: {one.problem}",
                code="dispatcher-fails",
                remedy=f"{ADVICE}; an error of the database names what to change there, such as a right or a trigger",
            )


def _never_seen(conn_id: str, delivers: str | None, seen: Sequence[DispatcherSeen]) -> Iterator[Finding]:
    """Report messages that wait in a store without a dispatcher.

    :param delivers: the connection of one of them; None: there are none.
    """
    if delivers is not None and not seen:
        yield Finding(
            state=State.WARNING,
            resource=f"messages of store {conn_id!r}",
            found="they wait for their due time, and no dispatcher was at work within a day",
            code="no-dispatcher",
            remedy="let a DAG with a StoreDispatchOperator run, or: airflow delayed dispatcher --store-conn-id"
            f" {quote(conn_id)} --deliver-conn-ids {quote(delivers)}",
        )


def _missed_runs(connection: SqlConnection, tables: Tables) -> dict[str | None, list[str]]:
    """Return the tags of messages about missed runs by the connection that delivers them; None: a queue table."""
    table = tables.messages
    # as a range, which an index serves whatever the database's collation is
    of_missed_runs = and_(table.c.Tag >= MISSED_RUN, table.c.Tag < MISSED_RUN[:-1] + chr(ord(MISSED_RUN[-1]) + 1))
    found = select(table.c.DeliverConnId, table.c.Tag).where(of_missed_runs).distinct().limit(_MOST)
    watched: dict[str | None, list[str]] = {}
    for row in connection.execute(found):
        watched.setdefault(row.DeliverConnId, []).append(row.Tag)
    return watched


def _without_service(
    conn_id: str, watched: Mapping[str | None, Sequence[str]], seen: Sequence[DispatcherSeen]
) -> Iterator[Finding]:
    """Report messages about missed runs that only a task of Airflow would dispatch, which may be what is missed."""
    services = [one for one in seen if one.dag_id is None and one.at_work]
    for name, tags in watched.items():
        if any(name in one.conn_ids for one in services):
            continue
        delivers = conn_id if name is None else name
        yield Finding(
            state=State.BLOCKED,
            resource=f"messages of store {conn_id!r} about missed runs, for connection {delivers!r}",
            found=f"no dispatcher outside Airflow's tasks is at work for {some(sorted(tags), separator=', ')}; if"
            " Airflow stands still, nobody hears that their runs are missed",
            code="no-service",
            remedy=f"run as a service: airflow delayed dispatcher --store-conn-id {quote(conn_id)} --deliver-conn-ids"
            f" {quote(delivers)}",
        )


def _failed(connection: SqlConnection, tables: Tables) -> dict[str, int]:
    """Count the failed messages by destination, the most frequent first."""
    first = select(tables.failed.c.Destination).where(tables.failed.c.Reason == "failed").limit(_MOST).subquery()
    many, name = func.count().label("many"), first.c.Destination
    counted = connection.execute(select(name, many).group_by(name).order_by(many.desc(), name))
    return {str(row.Destination): int(row.many) for row in counted}


def _of_failed(conn_id: str, by_destination: Mapping[str, int]) -> Iterator[Finding]:
    if by_destination:
        failed = sum(by_destination.values())
        count = f"at least {failed:,}" if failed == _MOST else f"{failed:,}"
        store = f"--store-conn-id {quote(conn_id)}"
        retry = f"airflow delayed retry {store} --destination {quote(next(iter(by_destination)))}"
        if len(by_destination) > 1:
            retry += f", and the same for {some(list(by_destination)[1:], separator=', ')}"
        yield Finding(
            state=State.WARNING,
            resource=f"failed messages of store {conn_id!r}",
            found=f"{count} were given up and are not tried again",
            code="failed",
            remedy=f"airflow delayed list {store} --state failed shows the reasons. When the cause is"
            f" repaired: {retry}; then a dispatcher has to run, which sends them. What nobody needs any more: cancel"
            " in place of retry",
        )


def _text(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"
