"""Whether the messages of a store are dispatched in time; if not, what keeps them. No Airflow here."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import pairwise
from shlex import quote

from sqlalchemy import Connection as SqlConnection
from sqlalchemy import case, func, select

from airflow_delayed.delivery import Finding, State
from airflow_delayed.diagnosis import clock_difference
from airflow_delayed.errors import some
from airflow_delayed.message import utcnow
from airflow_delayed.store import pauses
from airflow_delayed.store.counts import DispatcherSeen, dispatchers
from airflow_delayed.store.dialects import database_time
from airflow_delayed.store.dispatch.report import Trouble, TroubleKind
from airflow_delayed.store.lateness import (
    LATE_AFTER,
    MOST_OVERDUE,
    DestinationLateness,
    OverdueMessages,
    lateness,
    overdue,
)
from airflow_delayed.store.network import ADVICE
from airflow_delayed.store.pauses import Pause
from airflow_delayed.store.policy import LEASE
from airflow_delayed.store.records import UNREADABLE_HEADERS
from airflow_delayed.store.schema import Tables
from airflow_delayed.store.version import version_difference

#: Codes of findings that have a dispatcher's own text, which may name hosts, logins and other users' DAGs.
NAMES_HOSTS = frozenset(
    {"lease-too-short", "connection-fails", "destination-refuses", "destination-missing", "dispatcher-fails"}
)
#: The most rows that are counted; further ones make the count "at least".
_MOST = 10_000
#: Of so many messages, the next by due time, the connections are looked up that have to deliver them.
_NEXT = 1000
#: A destination that has taken nothing for so long fails, and no longer "needs a look".
_FAILS_AFTER = timedelta(seconds=10)
#: Of so many destinations each has a finding of its own; of further ones there is the number.
_MOST_DESTINATIONS = 5
#: A dispatcher that ended in good order comes again within a minute, or within twice its usual interval, of its last
#: runs.
_COMES_AGAIN, _RUNS = timedelta(minutes=1), 10


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCondition:
    """What is known of a store at a time: what is wrong, and how late its messages are."""

    at: datetime
    findings: Sequence[Finding]
    lateness: Sequence[DestinationLateness]
    #: By connection, the store's own name included, the due time of its next message that is not overdue.
    next_due: Mapping[str, datetime]
    #: Each has a finding, in this order.
    pauses: Sequence[Pause]
    #: Of the last day, the one seen last first.
    dispatchers: Sequence[DispatcherSeen]


def condition(connection: SqlConnection, tables: Tables, conn_id: str) -> StoreCondition:
    """Return what keeps messages of the store from being dispatched in time, and how late they are."""
    asked, now, answered = utcnow(), database_time(connection), utcnow()
    paused = pauses.read(connection, tables)
    late = overdue(connection, tables, now, paused)
    waiting = _waiting(connection, tables, now)
    failed = _failed(connection, tables)
    version = version_difference(connection, tables, conn_id)
    late_by_destination = lateness(connection, tables, conn_id, late, now)
    seen = dispatchers(connection, tables)
    findings = [
        *judge(conn_id, late, seen, now),
        *pauses.findings(conn_id, paused),
        *_of_dispatchers(conn_id, seen),
        *_not_coming(conn_id, waiting.keys() - {one.deliver_conn_id for one in late}, waiting, seen, now),
        *_of_failed(conn_id, failed),
        *([] if version is None else [version]),
        *clock_difference(conn_id, asked, now, answered),
    ]
    next_due = {name or conn_id: due for name, due in waiting.items()}
    return StoreCondition(
        at=now,
        findings=findings,
        lateness=late_by_destination,
        next_due=next_due,
        pauses=paused,
        dispatchers=seen,
    )


def _waiting(connection: SqlConnection, tables: Tables, now: datetime) -> dict[str | None, datetime]:
    table = tables.messages
    soon = table.c.Time > now - LATE_AFTER
    first = select(table.c.DeliverConnId, table.c.Time).where(soon).order_by(table.c.Time).limit(_NEXT).subquery()
    name, due = first.c.DeliverConnId, func.min(first.c.Time, type_=table.c.Time.type).label("due")
    return {row.DeliverConnId: row.due for row in connection.execute(select(name, due).group_by(name))}


def judge(
    conn_id: str,
    late: Sequence[OverdueMessages],
    seen: Sequence[DispatcherSeen],
    now: datetime,
) -> Iterator[Finding]:
    """Say what keeps each connection's messages: itself, its destinations, or that no dispatcher works."""
    troubles = _troubles(seen)
    connections = dict.fromkeys(one.deliver_conn_id for one in late)
    connections |= dict.fromkeys(one.conn_id for one in troubles if one.kind in _OF_SENDING)
    for each in connections:
        mine = [one for one in late if one.deliver_conn_id == each]
        name = conn_id if each is None else each
        own = [one for one in troubles if one.conn_id == each]
        if fails := next((one for one in own if one.kind is TroubleKind.CONNECTION), None):
            yield _failing(name, fails, mine)
            continue
        refuse = {one.destination or "": one for one in own if one.destination is not None}
        yield from _of_destinations(conn_id, name, refuse, mine, now)
        if not (mine := [one for one in mine if one.destination not in refuse]):
            continue
        serving = [one for one in seen if each in one.conn_ids]
        if not any(one.at_work for one in serving):
            oldest = min(one.oldest for one in mine)
            if not serving or serving[0].ended_at is None or now > min(oldest + _pause(serving), _comes_by(serving)):
                yield _without_dispatcher(conn_id, name, mine, serving, seen)
            continue
        yield _overdue(conn_id, name, mine)


_OF_SENDING = (
    TroubleKind.CONNECTION,
    TroubleKind.REFUSED,
    TroubleKind.MISSING,
    TroubleKind.FAILING,
)


def _troubles(seen: Sequence[DispatcherSeen]) -> list[Trouble]:
    first: dict[tuple[TroubleKind, str | None, str | None], Trouble] = {}
    for one in (trouble for dispatcher in seen if dispatcher.at_work for trouble in dispatcher.troubles):
        known = first.setdefault((one.kind, one.conn_id, one.destination), one)
        if one.since < known.since:
            first[one.kind, one.conn_id, one.destination] = replace(known, since=one.since)
    return sorted(first.values(), key=lambda one: one.since)


def _count(late: Sequence[OverdueMessages]) -> str:
    many = sum(one.messages for one in late)
    return f"at least {many:,}" if many >= MOST_OVERDUE else f"{many:,}"


def _condition(late: Sequence[OverdueMessages]) -> str:
    names = [f"{one.destination} ({one.messages:,})" for one in late]
    to = late[0].destination if len(late) == 1 else some(names, separator=", ")
    return f"{_count(late)} overdue, the oldest since {_text(min(one.oldest for one in late))}, for {to}"


def _waits(late: Sequence[OverdueMessages]) -> str:
    return f"{_count(late)} overdue; they wait in the store, and nothing is lost" if late else "nothing is overdue yet"


def _failing(name: str, trouble: Trouble, late: Sequence[OverdueMessages]) -> Finding:
    return Finding(
        state=State.BLOCKED,
        resource=f"connection {name!r}",
        found=f"dispatchers cannot send through it since {_text(trouble.since)}: {trouble.reason}",
        code="connection-fails",
        why=_waits(late),
        remedy="repair what the text names: the server, or host, port and login that Airflow has for the connection"
        " under Admin, Connections; dispatchers try again by themselves, and count no failure of a message",
        deliver_conn_id=name,
        since=trouble.since,
    )


def _of_destinations(
    conn_id: str, name: str, troubles: Mapping[str, Trouble], late: Sequence[OverdueMessages], now: datetime
) -> Iterator[Finding]:
    for number, (destination, trouble) in enumerate(troubles.items()):
        others = len(troubles) - number - 1 if number == _MOST_DESTINATIONS - 1 else 0
        waits = [one for one in late if one.destination == destination]
        to = f"--store-conn-id {quote(conn_id)} --destination {quote(destination)}"
        what, why, remedy = {
            TroubleKind.MISSING: (
                "it is not there since ",
                "its messages are given up, and kept as failed ones",
                f"make it: airflow delayed install --conn-id {quote(name)} --queue {quote(destination)}; then retry"
                f" what was given up: airflow delayed retry {to}",
            ),
            TroubleKind.REFUSED: (
                "it takes no messages since ",
                _waits(waits),
                "look whether its consumers are at work: the queue may be full, or without a leader; dispatchers try"
                " again every 10 s, and use up no retries",
            ),
            TroubleKind.FAILING: (
                "all its messages fail since ",
                _waits(waits),
                "repair what the text names, such as a right of the connection's user or a limit of the broker;"
                " messages are tried again by themselves. What was given up meanwhile is kept: airflow delayed retry"
                f" {to}",
            ),
        }[trouble.kind]
        yield Finding(
            state=State.BLOCKED if now - trouble.since >= _FAILS_AFTER else State.WARNING,
            resource=f"destination {destination!r} of connection {name!r}"
            + (f", and {others} others" if others else ""),
            found=f"{what}{_text(trouble.since)}: {trouble.reason}",
            destination=destination,
            code="destination-missing" if trouble.kind is TroubleKind.MISSING else "destination-refuses",
            why=why,
            remedy=remedy,
            deliver_conn_id=name,
            since=trouble.since,
        )
        if others:
            return


def _overdue(conn_id: str, name: str, late: Sequence[OverdueMessages]) -> Finding:
    retrying = sum(one.retrying for one in late)
    alone = retrying == sum(one.messages for one in late)
    tried = "; all were tried in vain" if alone else f"; {retrying:,} were tried in vain" if retrying else ""
    return Finding(
        state=State.WARNING,
        resource=f"messages of store {conn_id!r} for connection {name!r}",
        found=f"{_condition(late)}, although a dispatcher is at work for it{tried}",
        code="overdue",
        remedy=f"airflow delayed list --store-conn-id {quote(conn_id)} --state retrying shows the reasons; they are"
        " tried again by themselves"
        if alone
        else "more falls due than the dispatcher sends: raise max_rate, or run another dispatcher beside it; its log"
        " has errors, if there are any",
        deliver_conn_id=name,
        since=min(one.oldest for one in late),
    )


def _pause(runs: Sequence[DispatcherSeen]) -> timedelta:
    """Return how long messages may wait for the next run of a dispatcher; a service comes again at once, if at all."""
    if runs[0].dag_id is None:
        return _COMES_AGAIN
    starts = sorted((one.started_at for one in runs[:_RUNS] if one.dag_id is not None), reverse=True)
    gaps = sorted(later - earlier for later, earlier in pairwise(starts))
    return max(_COMES_AGAIN, 2 * gaps[len(gaps) // 2] if gaps else timedelta(0))


def _comes_by(runs: Sequence[DispatcherSeen]) -> datetime:
    return (runs[0].ended_at or runs[0].seen_at) + _pause(runs)


def _without_dispatcher(
    conn_id: str,
    name: str,
    late: Sequence[OverdueMessages],
    serving: Sequence[DispatcherSeen],
    seen: Sequence[DispatcherSeen],
) -> Finding:
    cause, remedy = _why_no_dispatcher(name, serving, [one for one in seen if one.at_work], seen, conn_id)
    return Finding(
        state=State.BLOCKED,
        resource=f"messages of store {conn_id!r} for connection {name!r}",
        found=f"{_condition(late)}, and {cause}",
        code="no-dispatcher",
        remedy=remedy,
        deliver_conn_id=name,
        since=min(one.oldest for one in late),
    )


def _why_no_dispatcher(
    name: str,
    serving: Sequence[DispatcherSeen],
    at_work: Sequence[DispatcherSeen],
    seen: Sequence[DispatcherSeen],
    conn_id: str,
) -> tuple[str, str]:
    start = _start(conn_id, name)
    if serving and serving[0].ended_at is None:
        last = _text(serving[0].seen_at)
        return (
            f"its dispatcher gave its last sign of life at {last}: it was killed, it hangs, or it cannot write to the"
            " database",
            f"look into the log of that {'service' if serving[0].dag_id is None else 'task'}; then {start}",
        )
    if serving and serving[0].ended_at is not None:
        others = f"; those at work deliver through {_names(at_work, conn_id)} alone" if at_work else ""
        return f"no dispatcher has been at work for it since {_text(serving[0].ended_at)}{others}", start
    if at_work:
        return f"the dispatchers at work deliver through {_names(at_work, conn_id)} alone", start
    others = f"; the last dispatchers delivered through {_names(seen, conn_id)}" if seen else ""
    return f"no dispatcher was at work for it within a day{others}", start


def _start(conn_id: str, name: str) -> str:
    return (
        f"let a dispatcher with {name!r} in its deliver_conn_ids run: a StoreDispatchOperator, whose DAG may be paused"
        f" or failing, or: airflow delayed dispatcher --store-conn-id {quote(conn_id)} --deliver-conn-ids"
        f" {quote(name)}"
    )


def _names(dispatchers: Sequence[DispatcherSeen], conn_id: str) -> str:
    names = {conn_id if one is None else one for each in dispatchers for one in each.conn_ids}
    return some(sorted(names), separator=", ")


def _of_dispatchers(conn_id: str, seen: Sequence[DispatcherSeen]) -> Iterator[Finding]:
    for one in seen:
        for trouble in one.troubles if one.at_work else ():
            resource, on = f"a dispatcher of store {conn_id!r}", f"on {one.host}, " if one.host else ""
            if trouble.kind is TroubleKind.LEASES:
                yield Finding(
                    state=State.WARNING,
                    resource=resource,
                    found=f"{on}{trouble.reason}",
                    code="lease-too-short",
                    remedy=f"raise the dispatcher's claim_timeout ({LEASE.total_seconds():g} s by default) above the"
                    " longest time that a batch takes, or lower batch_size, and look whether its machine stands still"
                    " at times; messages whose leases end are sent again",
                    since=trouble.since,
                )
            elif trouble.kind is TroubleKind.DATABASE:
                since = "yet" if one.worked_at is None else f"since {_text(one.worked_at)}"
                yield Finding(
                    state=State.BLOCKED,
                    resource=resource,
                    found=f"{on}it is at work, and has achieved nothing {since}: {trouble.reason}",
                    code="dispatcher-fails",
                    remedy=f"{ADVICE}; an error of the database names what to change there, such as a right or a"
                    " trigger",
                    since=trouble.since,
                )


def _not_coming(
    conn_id: str,
    connections: Collection[str | None],
    waiting: Mapping[str | None, datetime],
    seen: Sequence[DispatcherSeen],
    now: datetime,
) -> Iterator[Finding]:
    """Report messages that are not overdue yet, and have no dispatcher that would come in time."""
    for each in sorted(connections, key=lambda one: one or ""):
        serving = [one for one in seen if each in one.conn_ids]
        name = conn_id if each is None else each
        if any(one.at_work for one in serving):
            continue
        if not serving:
            found = "no dispatcher was at work for it within a day"
        elif serving[0].ended_at is None:
            found = f"its dispatcher gave its last sign of life at {_text(serving[0].seen_at)}"
        elif now > _comes_by(serving):
            found = f"no dispatcher has been at work for it since {_text(serving[0].ended_at)}, later than usual"
        else:
            continue
        yield Finding(
            state=State.WARNING,
            resource=f"messages of store {conn_id!r} for connection {name!r}",
            found=f"the next is due at {_text(waiting[each])}, and {found}",
            code="no-dispatcher",
            remedy=_start(conn_id, name),
            deliver_conn_id=name,
        )


def _failed(connection: SqlConnection, tables: Tables) -> dict[tuple[str, bool], int]:
    # as InvalidMessage has it
    unreadable = case((tables.failed.c.LastError.startswith(f"headers: {UNREADABLE_HEADERS}"), 1), else_=0).label(
        "unreadable"
    )
    chosen = select(tables.failed.c.Destination, unreadable).where(tables.failed.c.Reason == "failed")
    first = chosen.limit(_MOST).subquery()
    many, by = func.count().label("many"), (first.c.Destination, first.c.unreadable)
    counted = connection.execute(select(*by, many).group_by(*by).order_by(many.desc(), *by))
    return {(str(row.Destination), bool(row.unreadable)): int(row.many) for row in counted}


def _of_failed(conn_id: str, counted: Mapping[tuple[str, bool], int]) -> Iterator[Finding]:
    if not counted:
        return
    failed = sum(counted.values())
    count = f"at least {failed:,}" if failed == _MOST else f"{failed:,}"
    store = f"--store-conn-id {quote(conn_id)}"
    readable = [destination for destination, unreadable in counted if not unreadable]
    unreadable = sum(many for (_, unreadable), many in counted.items() if unreadable)
    if readable:
        retry = f"airflow delayed retry {store} --destination {quote(readable[0])}"
        if len(readable) > 1:
            retry += f", and the same for {some(readable[1:], separator=', ')}"
        remedy = (
            f"airflow delayed list {store} --state failed shows the reasons. When the cause is repaired: {retry}; then"
            " a dispatcher has to run, which sends them. What nobody needs any more: cancel in place of retry"
        )
    else:
        remedy = (
            "correct what writes them; a retry would fail again. To remove them: airflow delayed cancel"
            f" {store} --state failed"
        )
    yield Finding(
        state=State.WARNING,
        resource=f"failed messages of store {conn_id!r}",
        found=f"{count} were given up and are not tried again"
        + (f"; the rows of {unreadable:,} cannot be read" if unreadable else ""),
        code="failed",
        remedy=remedy,
    )


def _text(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"
