"""Escalations: messages about failures, each due some time after a failure unless a success takes it back first.

Callbacks about failures and successes come in any order, from several hosts at once. So each transaction first locks
the marks of what it is about, and of two transactions about one run the second sees what the first has done.

A mark is a row of the table of remembered ids (``_past``) with the outcome "mark". It is forgotten as an id is, and no
message has its id, which begins with a blank. There are three kinds:

- of a run, or of a task in it: Time is when the attempt that succeeded had started, as Airflow's database has it;
- of the scheduled runs of a DAG: Time is the ``run_after`` of the newest that succeeded;
- of a failure that joined the message of an earlier one.

A message has the failures that it stands for in its header :data:`HEADER`. No Airflow here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from enum import Enum
from typing import Any

from sqlalchemy import Connection, Table, select

from airflow_delayed.errors import InvalidMessage
from airflow_delayed.fields import FIELD_COLUMNS
from airflow_delayed.identity import key_id
from airflow_delayed.message import EPOCH, DelayedMessage, parse_moment
from airflow_delayed.store import remembered_ids
from airflow_delayed.store.audit import AuditEntry
from airflow_delayed.store.changes import Cancel, locate
from airflow_delayed.store.database import slices
from airflow_delayed.store.dialects import database_time, dialect_of
from airflow_delayed.store.enqueue import enqueue_rows, known, message_rows
from airflow_delayed.store.filters import BOTH, MessageFilter
from airflow_delayed.store.outcomes import Outcome, Outcomes
from airflow_delayed.store.records import delivered_by, to_message, to_row
from airflow_delayed.store.schema import Tables

#: The header with the failures: JSON, an object with their number ("failures") and the newest of them ("latest").
HEADER = "airflow-escalation"
#: The most failures that the header names, and its most characters: with long names it names fewer.
NAMED_FAILURES, MAX_HEADER = 10, 8000

#: The columns of a message that a change of its content reads.
_CONTENT = ("Id", "Destination", "State", "Time", "Headers", *FIELD_COLUMNS.values(), "DeliverConnId")
_TIMES = ("started_at", "run_after", "failed_at")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAttempt:
    """A run of a DAG, or a task instance in it, since it last started.

    :param name: identifies the run, or the task instance: the same for all its attempts.
    :param tag: of the messages about it.
    :param other_tags: further tags that a message about it may have.
    :param started_at: when this attempt started, as Airflow's database has it; None: unknown.
    :param run_after: of a scheduled run whose later runs replace it; all of them have the same tag. None: no other run
        replaces it.
    :param ended_at: when it ended, by Airflow's clock.
    """

    name: str
    run_id: str
    tag: str
    other_tags: Sequence[str] = ()
    started_at: datetime | None = None
    run_after: datetime | None = None
    ended_at: datetime | None = None

    def ends(self, failure: RunFailure) -> bool:
        """Return whether a success of this attempt ends a failure: of an attempt that is no later, or of an older run.

        Runs with the same ``run_after`` do not replace each other.
        """
        if self.run_id == failure.run_id:
            return self.started_at is None or failure.started_at is None or failure.started_at <= self.started_at
        return self.run_after is not None and failure.run_after is not None and failure.run_after < self.run_after


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFailure:
    """A failed attempt, as header and default body of a message have it.

    :param failed_at: by Airflow's clock.
    :param started_at: as :class:`RunAttempt` has it; so is ``run_after``.
    :param problem: why the message is not as its author wrote it.
    """

    dag_id: str
    run_id: str
    task_id: str | None = None
    map_index: int | None = None
    failed_at: datetime
    started_at: datetime | None = None
    run_after: datetime | None = None
    reason: str | None = None
    run_url: str | None = None
    log_url: str | None = None
    problem: str | None = None

    @property
    def place(self) -> tuple[datetime, datetime, datetime]:
        """Its place among the failures of one message: a success ends the first ones up to some place."""
        return self.run_after or EPOCH, self.started_at or EPOCH, self.failed_at

    def plain(self) -> dict[str, Any]:
        """Return the failure as JSON has it, without what is None."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        values |= {name: values[name].isoformat() for name in _TIMES if values[name] is not None}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> RunFailure:
        """Return the failure of :meth:`plain`.

        :raises InvalidMessage: a time is none.
        :raises TypeError: a name is missing or unknown.
        """
        values: dict[str, Any] = {
            name: parse_moment(name, one) if name in _TIMES else one for name, one in plain.items()
        }
        return cls(**values)


@dataclass(frozen=True, slots=True)
class RunFailures:
    """The failures that one message stands for.

    :param latest: the newest ones, in the order of their places.
    :param count: how many there are.
    """

    latest: Sequence[RunFailure] = ()
    count: int = 0

    def header(self) -> dict[str, str]:
        """Return them as a header."""
        named = [one.plain() for one in self.latest[-NAMED_FAILURES:]]
        while len(text := json.dumps({"failures": self.count, "latest": named})) > MAX_HEADER and len(named) > 1:
            del named[0]
        return {HEADER: text}

    @classmethod
    def of(cls, headers: Mapping[str, Any]) -> RunFailures:
        """Return those of a message's headers; none if the header is missing or malformed: any success ends them."""
        try:
            plain = json.loads(headers[HEADER])
            latest = [RunFailure.of(one) for one in plain["latest"]]
            return cls(latest, int(plain["failures"])) if latest else cls()
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, InvalidMessage):
            return cls()

    def body(self) -> bytes:
        """Return the default body: JSON with the newest failure, their number, and of several the newest ones."""
        named = json.loads(self.header()[HEADER])
        more = {"latest": named["latest"]} if self.count > 1 else {}
        whole = {**named["latest"][-1], "failures": self.count, **more}
        return json.dumps(whole, ensure_ascii=False, separators=(",", ":")).encode()

    def and_also(self, failure: RunFailure) -> RunFailures:
        """Return these and a further failure."""
        return RunFailures(sorted([*self.latest, failure], key=lambda one: one.place)[-NAMED_FAILURES:], self.count + 1)

    def after(self, success: RunAttempt) -> RunFailures:
        """Return the failures that a success does not end."""
        rest = [one for one in self.latest if not success.ends(one)]
        if len(rest) == len(self.latest) and rest:
            # some of the unnamed failures may have ended; it stands for the named ones in any case
            return self
        # the unnamed failures come before the named ones, of which the first have ended
        return RunFailures(rest, len(rest))


class ArmOutcome(str, Enum):
    """What became of a failure."""

    #: A message waits for it.
    STORED = "stored"
    #: The message of an earlier failure, which waits, stands for it too.
    JOINED = "joined"
    #: This failure has had its message before.
    KNOWN = "known"
    #: The run, or a later run in its place, has succeeded in the meantime.
    SUCCEEDED = "succeeded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Escalation:
    """The message for a failure.

    :param attempt: what failed.
    :param message: with the attempt's tag.
    :param failure: what the message says of it.
    :param beginning: the ids of this notifier's messages with this tag begin with it.
    """

    attempt: RunAttempt
    message: DelayedMessage
    failure: RunFailure
    beginning: str


@dataclass(frozen=True, slots=True)
class TakenBack:
    """What a success did.

    :param outcomes: of the messages all of whose failures it ended.
    :param reduced: the ids of messages that stand for other failures too, which goes on.
    """

    outcomes: Outcomes = field(default_factory=Outcomes)
    reduced: list[str] = field(default_factory=list)


def arm(
    connection: Connection, *, tables: Tables, wanted: Escalation, deliver_conn_id: str | None, run: int | None
) -> tuple[ArmOutcome, str]:
    """Store the message for a failure, see :meth:`airflow_delayed.store.api.Store.arm`.

    :param deliver_conn_id: None: the store's own queue tables.
    :param run: the number of the run.
    """
    message, now = wanted.message, database_time(connection)
    run_succeeded, newest = _lock_marks(connection, tables, wanted.attempt, now)
    if _came_first(wanted.attempt, run_succeeded, newest):
        return ArmOutcome.SUCCEEDED, message.message_id
    joined = _mark_id("failure", message.message_id)
    if known(connection, tables, [message.message_id]) or remembered_ids.marks(connection, tables, [joined]):
        return ArmOutcome.KNOWN, message.message_id
    for waiting in _lock_waiting(connection, tables, wanted, deliver_conn_id, now):
        failures = RunFailures.of(waiting.headers)
        _rewrite(connection, tables.messages, waiting, failures, failures.and_also(wanted.failure), deliver_conn_id)
        remembered_ids.insert_marks(connection, tables, [joined], now)
        return ArmOutcome.JOINED, waiting.message_id
    headers = {**message.headers, **RunFailures([wanted.failure], 1).header()}
    rows = message_rows([replace(message, headers=headers)], deliver_conn_id, run, until_due=True)
    stored = enqueue_rows(connection, tables, rows, "keep", deliver_conn_id).new
    return ArmOutcome.STORED if stored else ArmOutcome.KNOWN, message.message_id


def take_back(connection: Connection, *, tables: Tables, success: RunAttempt, change: Cancel, actor: str) -> TakenBack:
    """Remember a success, and cancel the messages all of whose failures it ends."""
    now = database_time(connection)
    seen = _lock_marks(connection, tables, success, now)
    for name, moment, before in zip(_mark_ids(success), (success.started_at, success.run_after), seen, strict=False):
        if moment is not None and (before is None or before < moment):
            mark = dialect_of(connection).update_rows(tables.past, [name])
            connection.execute(mark.values(Time=moment, At=now))
    taken, ended = TakenBack(), list[str]()
    for where in BOTH:
        table = tables.of(where)
        tagged = select(table.c.Id).where(table.c.Tag.in_([success.tag, *success.other_tags]))
        for message, conn_id, leased in _lock(connection, tables, table, tagged, now):
            failures = RunFailures.of(message.headers)
            rest = failures.after(success)
            if not rest.count:
                ended.append(message.message_id)
            elif rest != failures and not leased:
                due_at = _later(message, failures, rest, success)
                _rewrite(connection, table, message, failures, rest, conn_id, due_at)
                taken.reduced.append(message.message_id)
    if ended:
        located = locate(connection, tables, ended, now, MessageFilter(), lock=True)
        decided = [(one, Outcome.IN_FLIGHT if one.leased else change.decide(one, now)) for one in located]
        change.apply(connection, tables, decided, now)
        taken.outcomes.add({one.message_id: outcome for one, outcome in decided})
        entry = AuditEntry(actor, change.action, {"tag": success.tag})
        entry.write(connection, tables, taken.outcomes.counts, now)
    return taken


def _later(message: DelayedMessage, failures: RunFailures, rest: RunFailures, success: RunAttempt) -> datetime | None:
    """Return when a message is due if all failures that go on came after the success; counted from the first of them.

    None: something has been red all the time since its first failure, and its due time stays.
    """
    first = min(one.failed_at for one in rest.latest)
    if success.ended_at is None or first <= success.ended_at:
        return None
    return message.due_at + (first - min(one.failed_at for one in failures.latest))


def _came_first(failed: RunAttempt, run_succeeded: datetime | None, newest: datetime | None) -> bool:
    """Return whether a success that ends a failure came before the failure; one whose start is unknown has not ended.

    :param run_succeeded: when the attempt of the run that succeeded had started.
    :param newest: the ``run_after`` of the newest run that succeeded, of the runs that replace each other.
    """
    if run_succeeded is not None and failed.started_at is not None and failed.started_at <= run_succeeded:
        return True
    return newest is not None and failed.run_after is not None and failed.run_after < newest


# marks


def _mark_id(kind: str, name: str) -> str:
    return f"{remembered_ids.MARK_BEGINS}{kind} {key_id((kind,), (name,))}"


def _mark_ids(attempt: RunAttempt) -> list[str]:
    """Return the ids of the run's mark and, if later runs replace it, of their mark."""
    own = _mark_id("run", attempt.name)
    return [own] if attempt.run_after is None else [own, _mark_id("runs", attempt.tag)]


def _lock_marks(
    connection: Connection, tables: Tables, attempt: RunAttempt, now: datetime
) -> tuple[datetime | None, datetime | None]:
    """Insert the marks of an attempt where they are missing, lock them, and return what they say of successes.

    :return: when the attempt of this run that succeeded had started, and the ``run_after`` of the newest run that did.
    """
    names = _mark_ids(attempt)
    own, *of_all = remembered_ids.lock_marks(connection, tables, names, now)
    return own, of_all[0] if of_all else None


# messages


def _lock_waiting(
    connection: Connection, tables: Tables, wanted: Escalation, deliver_conn_id: str | None, now: datetime
) -> list[DelayedMessage]:
    """Lock and return the messages of the same notifier that wait and can be taken back, the first by due time.

    A notifier whose templates name another destination for another failure has a message for each of them.
    """
    table, message = tables.messages, wanted.message
    own = table.c.Id.startswith(wanted.beginning, autoescape=True)
    same = (table.c.Destination == message.destination, delivered_by(table, deliver_conn_id))
    found = select(table.c.Id).where(table.c.Tag == message.tag, own, *same, table.c.Time > now)
    locked = _lock(connection, tables, table, found, now)
    free = [message for message, _, leased in locked if not leased and message.due_at > now]
    return sorted(free, key=lambda message: message.due_at)


def _lock(
    connection: Connection, tables: Tables, table: Table, ids: Any, now: datetime
) -> list[tuple[DelayedMessage, str | None, bool]]:
    """Lock messages, waiting for other changes of them; return each with its connection and whether it has a lease.

    :param ids: the query for their ids.
    """
    dialect, locked = dialect_of(connection), list[tuple[DelayedMessage, str | None, bool]]()
    for some in slices(sorted(connection.execute(ids).scalars())):
        content = select(*(table.c[name] for name in _CONTENT)).where(table.c.Id.in_(some)).order_by(table.c.Id)
        statement = dialect.by_key(content.with_for_update(), table)
        rows = [dict(row._mapping) for row in connection.execute(statement)]
        # a second statement, as remembered_ids.py says
        leased = remembered_ids.in_flight(connection, tables, [row["Id"] for row in rows], now)
        locked += [(to_message(row), row["DeliverConnId"], row["Id"] in leased) for row in rows]
    return locked


def _rewrite(
    connection: Connection,
    table: Table,
    message: DelayedMessage,
    before: RunFailures,
    failures: RunFailures,
    deliver_conn_id: str | None,
    due_at: datetime | None = None,
) -> None:
    """Let a message stand for other failures than before; a body of its author stays.

    :param due_at: None: its due time stays.
    """
    is_default = before.count > 0 and message.body == before.body()
    body = failures.body() if is_default else message.body
    row = to_row(replace(message, body=body, headers={**message.headers, **failures.header()}), deliver_conn_id)
    values = {name: row[name] for name in ("State", "Headers", "Digest")}
    if due_at is not None:
        # no dispatcher takes it before it is due
        values |= {"Time": due_at, "NextTry": due_at}
    connection.execute(dialect_of(connection).update_rows(table, [message.message_id]).values(values))
