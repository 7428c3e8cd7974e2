"""What the page's verdict and ``airflow delayed doctor`` make of the findings of several connections.

A store's messages wait for the reason that their connection has itself, or because the DAG of their dispatcher is
paused, which Airflow alone knows. So findings that follow from another one become a part of it, and both say the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from shlex import quote
from typing import TYPE_CHECKING, Protocol, TypeVar

from airflow_delayed.errors import one_line, some
from airflow_delayed.reports import SEVERITIES, Finding, State

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

#: Codes of a connection that gives no answer, or cannot be examined: the cause of all that waits for it.
NO_ANSWER = ("unreachable", "silent")
#: Codes of what follows from that.
_FOLLOWS = ("connection-fails", "destination-refuses", "overdue")
#: The code of what follows from any error of a broker: messages that stay in its levels.
_STUCK = "stuck"
#: What to do about a connection that gives no answer, by its code.
_REMEDIES = {
    "unreachable": "look whether its server runs and can be reached, with the host and port that Airflow has for it"
    " under Admin, Connections; until then its messages wait",
    "silent": "look whether its database or broker hangs (frozen, disk full, waiting for locks) or a firewall drops"
    " packets, and whether the host is right that Airflow has for it under Admin, Connections; until then its messages"
    " wait",
}
_DIFFERS = (
    "somebody declared it otherwise: a TopologyInstallOperator makes it as wanted, on RabbitMQ with replace=True, when"
    " nothing waits in it, on SQS with repair=True; a table is changed by hand"
)
_LOGIN = (
    "correct the login, the password or the schema that Airflow has for it under Admin, Connections, or give that user"
    " its rights; until then its messages wait"
)
_CROWDED = (
    "RabbitMQ's management page shows under Connections which clients hold them; until one is free its messages wait"
)
_UNSTICK = "consume, or declare, the destination that verify and the doctor name (destination-full, missing)"
_REBALANCE = (
    "; on a cluster of RabbitMQ 3.10, after a leader was lost and when all queues are well: rabbitmq-queues rebalance"
    " quorum"
)
#: What the transports and the drivers of databases say when a server accepts a connection and does not answer.
_TIMED_OUT = ("timeout expired", "timed out", "no answer in time")
#: Words of the errors of brokers and databases that take the connection and refuse the user.
_REFUSED_LOGIN = re.compile(r"password|authenticat|login|access denied|no rights|does not exist", re.IGNORECASE)
#: Of the error of a RabbitMQ that takes no further connection of the user, or in the virtual host.
_AT_LIMIT = "limit max-connections"
#: By how much the clocks of a store and of this machine may differ.
_TOLERANCE = timedelta(seconds=5)
#: DAGs of a store's last dispatchers, at most, that are looked at.
MOST_DAGS = 10


class _Described(Protocol):
    @property
    def code(self) -> str | None: ...
    @property
    def severity(self) -> str: ...
    @property
    def deliver_conn_id(self) -> str | None: ...


class _Run(Protocol):
    @property
    def conn_ids(self) -> Sequence[str | None]: ...
    @property
    def ended_at(self) -> datetime | None: ...
    @property
    def at_work(self) -> bool: ...
    @property
    def dag_id(self) -> str | None: ...


class _Late(Protocol):
    @property
    def conn_id(self) -> str: ...
    @property
    def destination(self) -> str: ...
    @property
    def overdue(self) -> int: ...
    @property
    def late_seconds(self) -> float: ...


F = TypeVar("F", bound=_Described)
T = TypeVar("T")


def merged(found: Iterable[tuple[str, F]], join: Callable[[F, F], F]) -> list[tuple[str, F]]:
    """Return findings by connection, the gravest and causes first, without the findings that follow from another."""
    kept: list[tuple[str, F]] = []
    follows: list[tuple[str, F]] = []
    everything = list(found)
    for conn_id, finding in everything:
        is_consequence = any(_follows(conn_id, finding, name, other) for name, other in everything)
        (follows if is_consequence else kept).append((conn_id, finding))
    for name, consequence in follows:
        for number, (conn_id, finding) in enumerate(kept):
            if _follows(name, consequence, conn_id, finding):
                kept[number] = conn_id, join(finding, consequence)
                break
    # a dispatcher may have ended because its broker is away
    kept.sort(key=lambda one: (SEVERITIES.index(one[1].severity), one[1].code not in NO_ANSWER))
    return kept


def _follows(conn_id: str, finding: _Described, other_conn_id: str, other: _Described) -> bool:
    broker = conn_id if finding.code == _STUCK else finding.deliver_conn_id
    if broker != other_conn_id:
        return False
    if finding.code == _STUCK:
        return other.severity == "error"
    return finding.code in _FOLLOWS and other.code in NO_ANSWER


def no_answer(conn_id: str, text: str, *, away: bool, silent: bool = False) -> Finding:
    """Return the finding for a connection that gives no answer.

    :param away: its server refuses or cannot be reached; else the connection could not be examined.
    :param silent: the server takes connections and does not answer; also if its error says so.
    """
    silent = away and (silent or any(words in text for words in _TIMED_OUT))
    code = "silent" if silent else "unreachable"
    remedy = _REMEDIES[code] if away else None
    if away and not silent:
        remedy = _CROWDED if _AT_LIMIT in text else _LOGIN if _REFUSED_LOGIN.search(text) else remedy
    return Finding(state=State.BLOCKED, resource=f"connection {conn_id!r}", found=text, code=code, remedy=remedy)


def grouped(found: Iterable[T], kind: Callable[[T], Hashable]) -> list[list[T]]:
    """Return findings of the same kind together, in the order of the first of each kind."""
    groups: dict[Hashable, list[T]] = {}
    for one in found:
        groups.setdefault(kind(one), []).append(one)
    return list(groups.values())


def one_of_each(found: Iterable[Finding]) -> list[Finding]:
    """Return the first finding of each code and remedy, with the number of the others."""
    return [
        replace(first, resource=f"{first.where}, and {len(others)} others", argument=None) if others else first
        for first, *others in grouped(found, lambda one: (one.to_json()["code"], one.remedy))
    ]


def frequent_reason(failures: Iterable[tuple[str | None, int]]) -> str:
    """Return what to add to the finding of failed messages: the reason of most of them, which not all may read."""
    counts = Counter[str]()
    for reason, many in failures:
        counts.update({reason: many} if reason else {})
    return f", most of them because: {one_line(counts.most_common(1)[0][0])}" if counts else ""


def unroutable(queue: str, messages: int) -> Finding:
    """Return the finding for messages of RabbitMQ that no destination took."""
    return Finding(
        state=State.WARNING,
        resource=f"queue {queue}",
        found=f"{messages:,} messages whose destination was not there when they were due; redrive() sends them on",
        code="unroutable",
    )


def stuck(resource: str, messages: int, *, has_members: bool = False) -> Finding:
    """Return the finding for messages of delay levels that dead-lettering could not pass on."""
    return Finding(
        state=State.WARNING,
        resource=resource,
        found=f"{messages:,} due messages are not taken by where they go next; if that lasts, a destination is full or"
        " unroutable, and all behind them wait",
        code="stuck",
        remedy=_UNSTICK + (_REBALANCE if has_members else ""),
    )


def last_dags(
    runs: Sequence[_Run], may_read: Callable[[str], bool], *, hidden: str | None = None
) -> dict[str | None, tuple[str, bool]]:
    """Return by connection the DAG that dispatched last, and whether it is paused; none with a dispatcher at work.

    Whoever may write the table of dispatchers can name any DAG there: a DAG counts only if a task of it dispatches.

    :param runs: the one seen last first.
    :param hidden: stands for a DAG that the user may not read.
    """
    from airflow.models.dag import DagModel
    from airflow.utils.session import create_session
    from sqlalchemy import select

    found: dict[str | None, tuple[str, bool]] = {}
    connections = dict.fromkeys(name for one in runs for name in one.conn_ids)
    with create_session() as session:
        dispatches: dict[str, bool | None] = {}

        def paused(dag_id: str) -> bool | None:
            """Return whether a DAG is paused; None: it does not dispatch, or must not be looked at."""
            if dag_id not in dispatches and len(dispatches) < MOST_DAGS:
                known = may_read(dag_id) and _dispatches(dag_id, session)
                is_paused = (
                    session.scalar(select(DagModel.is_paused).where(DagModel.dag_id == dag_id)) if known else None
                )
                dispatches[dag_id] = is_paused
            return dispatches.get(dag_id)

        for name in connections:
            serving = [one for one in runs if name in one.conn_ids]
            if any(one.at_work for one in serving):
                continue
            for one in serving:
                if one.dag_id is None or one.dag_id == hidden or one.ended_at is None:
                    break
                if (is_paused := paused(one.dag_id)) is not None:
                    found[name] = one.dag_id, is_paused
                    break
    return found


def _dispatches(dag_id: str, session: Session) -> bool:
    from airflow.models.serialized_dag import SerializedDagModel

    written = SerializedDagModel.get(dag_id, session=session)
    tasks = written.data["dag"]["tasks"] if written is not None and written.data else []
    return any({"store_conn_id", "deliver_conn_ids"} <= {*task["__var"].get("template_fields", ())} for task in tasks)


def with_paused(
    store: str,
    findings: Iterable[F],
    dags: Mapping[str | None, tuple[str, bool]],
    lateness: Sequence[_Late],
    next_due: Mapping[str, datetime],
    at: datetime,
    made: Callable[[Finding], F],
) -> list[F]:
    """Return findings of a store; of messages that wait for a paused DAG they say that, and not what the store says.

    :param store: the store's name, which stands for its queue tables.
    :param dags: what :func:`last_dags` has returned.
    :param lateness: of the store's destinations at the time ``at``.
    :param next_due: by connection, the next message that is not overdue.
    """
    found: dict[str | None, F] = {}
    for conn_id, (dag_id, is_paused) in dags.items():
        if not is_paused:
            continue
        name = store if conn_id is None else conn_id
        late = [one for one in lateness if one.conn_id == name and one.overdue]
        if late:
            since = at - timedelta(seconds=max(one.late_seconds for one in late))
            names = some([f"{one.destination} ({one.overdue:,})" for one in late], separator=", ")
            many = sum(one.overdue for one in late)
            condition = f"{many:,} overdue, the oldest since {since:%Y-%m-%d %H:%M:%S} UTC, for {names}"
        elif name in next_due:
            condition = f"the next is due at {next_due[name]:%Y-%m-%d %H:%M:%S} UTC"
        else:
            continue
        finding = Finding(
            state=State.BLOCKED if late else State.WARNING,
            resource=f"messages of store {store!r} for connection {name!r}",
            found=f"{condition}; the DAG of the last dispatcher, {dag_id}, is paused",
            code="no-dispatcher",
            remedy=f"unpause the DAG {dag_id}",
            deliver_conn_id=name,
        )
        found[name] = made(finding)
    others = [one for one in findings if one.code != "no-dispatcher" or one.deliver_conn_id not in found]
    return [*found.values(), *others]


def with_remedies(conn_id: str, report: Iterable[Finding]) -> list[Finding]:
    """Return findings, all that is missing or differs with the command that repairs it."""
    found = list(report)
    missing = [each for each in found if each.state is State.MISSING]
    missing += [each for each in found if each.code == "unroutable"]
    queues = dict.fromkeys(each.destination for each in missing if each.destination)
    install = " ".join(
        [f"airflow delayed install --conn-id {quote(conn_id)}", *(f"--queue {quote(name)}" for name in queues)]
    )
    remedy = f"install what is missing: {install}"
    redrive = (
        f"airflow delayed redrive --conn-id {quote(conn_id)} --dry-run names their destinations; when these exist, the"
        " same without --dry-run sends the messages, and so does the page"
    )

    def remedy_of(each: Finding) -> str | None:
        if each.state is State.MISSING:
            return remedy
        if each.code == "unroutable":
            # a destination that is not bound, or messages that have none
            return remedy if each.destination else redrive
        return each.remedy or (_DIFFERS if each.state is State.DIFFERS else None)

    return [replace(each, remedy=remedy_of(each)) for each in found]


def clock_difference(conn_id: str, asked: datetime, stated: datetime, answered: datetime) -> list[Finding]:
    """Return the finding for a store whose clock certainly differs from this machine's by more than 5 s.

    :param asked: when it was asked for its time, by this machine's clock.
    :param answered: when its answer was there.
    """
    ahead = stated > answered
    difference = stated - answered if ahead else asked - stated
    if difference <= _TOLERANCE:
        return []
    by = f"{difference.total_seconds():,.0f} s {'ahead of' if ahead else 'behind'}"
    return [
        Finding(
            state=State.WARNING,
            resource=f"clock of store {conn_id!r}",
            found=f"the database is {by} this machine; a"
            " due time that a task computes from its own clock is dispatched by the database's, so early or late by"
            " that much",
            code="clock-difference",
            remedy="let the database's machine and Airflow's machines follow NTP (chronyc tracking shows how far off a"
            " machine is)",
        )
    ]
