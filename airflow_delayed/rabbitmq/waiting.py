"""The messages that wait: their numbers by level and in queues that are to be deleted, and the due time of each.

:func:`read` and :func:`read_waited` take destination and due time from a message's key and headers. No message is read
as due too early. A message may state several times: the latest that is not provably old counts; if all are,
the latest time at which its level could deliver the message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from airflow_delayed.delivery import Finding
from airflow_delayed.errors import InvalidMessage
from airflow_delayed.message import EPOCH, UTC, parse_moment
from airflow_delayed.nservicebus import DELIVER_AT, parse_nservicebus_time
from airflow_delayed.rabbitmq import cluster, levels
from airflow_delayed.rabbitmq.management import Facts
from airflow_delayed.rabbitmq.properties import DESTINATION, DUE_AT, ORIGINAL_KEY
from airflow_delayed.rabbitmq.topology import (
    NSERVICEBUS_DELAY,
    NSERVICEBUS_RETRIED,
    NSERVICEBUS_TIME_SENT,
    Topology,
)

if TYPE_CHECKING:
    from pika import BasicProperties


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelWaiting:
    """The messages that wait in one level."""

    level: int
    queue: str
    #: Messages that wait, with the stuck messages if their number is known. None: the queue is missing, or it has no
    #: leader that counts them.
    messages: int | None
    #: Messages that are due to go on and could not; None: unknown.
    stuck: int | None
    #: When the first of them may fall due, and when the last will have: now, and 2**(level + 1) - 1 s later.
    earliest: datetime
    latest: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """The messages that wait in a topology at one moment; ``str()`` of it is a small table for a log.

    Messages move on meanwhile, and the number of stuck messages is up to 5 s old.
    """

    at: datetime
    levels: tuple[LevelWaiting, ...]
    #: The queue for messages that no destination took.
    unroutable_queue: str
    #: How many messages are in it; None: there is no such queue, or it has no leader that counts them.
    unroutable: int | None
    #: Why messages could not be counted, be it the stuck ones or all of a queue; None if they were.
    why_unknown: str | None = None
    #: Queues that have no leader, or too few members that run, and all queues if the management API is there and did
    #: not answer in time: their messages are unknown.
    unavailable: tuple[str, ...] = ()
    #: What is wrong with the queues' leaders and members, as far as the management API's list of queues shows it.
    findings: tuple[Finding, ...] = ()

    @property
    def messages(self) -> int | None:
        """All messages in the levels; None if those of a level are unknown.

        Without the management API, stuck messages are not among them (``stuck`` is None), and a queue without a leader
        counts as empty.
        """
        if any(level.queue in self.unavailable for level in self.levels):
            return None
        return sum(level.messages or 0 for level in self.levels)

    @property
    def stuck(self) -> int | None:
        """All messages that are stuck; None if that is unknown for a level."""
        known = [level.stuck for level in self.levels if level.stuck is not None]
        return sum(known) if len(known) == len(self.levels) - len(self.missing) else None

    @property
    def missing(self) -> tuple[str, ...]:
        """Level queues that do not exist."""
        unknown = set(self.unavailable)
        return tuple(level.queue for level in self.levels if level.messages is None and level.queue not in unknown)

    def __str__(self) -> str:
        header = ("queue", "messages", "stuck", "due from", "due by")
        rows = [
            (level.queue, _count(level.messages), _count(level.stuck), _time(level.earliest), _time(level.latest))
            for level in self.levels
            if level.messages or level.stuck or level.queue in self.unavailable
        ]
        least = "at least " if self.stuck is None and self.messages is not None else ""
        rows.append(("all levels", f"{least}{_count(self.messages)}", _count(self.stuck), "", ""))
        absent = self.unroutable is None and self.unroutable_queue not in self.unavailable
        unroutable = "no such queue" if absent else _count(self.unroutable)
        rows.append((self.unroutable_queue, unroutable, "", "", ""))
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = [
            "  ".join(
                text.rjust(width) if number in (1, 2) else text.ljust(width)
                for number, (text, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in (header, *rows)
        ]
        if self.missing:
            lines.append(f"missing: {', '.join(self.missing)}")
        if self.why_unknown:
            what = "of some queues" if self.unavailable else "stuck in dead-lettering"
            lines.append(f"messages {what} are not counted: {self.why_unknown}")
        return "\n".join(lines)


def waiting(
    topology: Topology,
    now: datetime,
    counts: Mapping[str, int | None],
    facts: Facts,
) -> Waiting:
    """Add the counts of AMQP and of the management API.

    A passive declare's count leaves out messages that are stuck in dead-lettering, so the two are added. It is 0 for a
    queue without a leader, so that of such a queue nothing is known.

    :param counts: AMQP's count of each queue; None for a queue that is missing.
    :param facts: the management API's list of queues, or why there is none.
    """
    names = [*map(topology.level_name, range(levels.BITS)), topology.unroutable_queue]
    queues = facts.queues
    there = [queues[name] for name in names if queues and name in queues]
    unavailable = {queue.name for queue in cluster.unavailable(there)}
    if facts.silent:
        unavailable = {name for name in names if counts.get(name) is not None}
    found = []
    for level, name in enumerate(names[:-1]):
        ready = None if name in unavailable else counts.get(name)
        stuck = None
        if ready is not None:
            known = (queues or {}).get(name)
            # a classic queue has no such state
            stuck = (known.stuck if known else None) if topology.keeps_stuck else 0
        found.append(
            LevelWaiting(
                level=level,
                queue=name,
                messages=None if ready is None else ready + (stuck or 0),
                stuck=stuck,
                earliest=now,
                latest=latest(now, level),
            )
        )
    why_unknown = None
    if facts.silent:
        why_unknown = facts.why
    elif unavailable:
        why_unknown = f"{len(unavailable)} have no leader, or too few members that run"
    elif any(level.stuck is None and level.messages is not None for level in found):
        why_unknown = facts.why if queues is None else "the broker has no statistics of some queues (yet)"
    return Waiting(
        at=now,
        levels=tuple(found),
        unroutable_queue=topology.unroutable_queue,
        unroutable=None if names[-1] in unavailable else counts.get(names[-1]),
        why_unknown=why_unknown,
        unavailable=tuple(name for name in names if name in unavailable),
        findings=tuple(cluster.uncounted(facts, names) if facts.silent else cluster.judge_queues(there, names[:-1])),
    )


def latest(now: datetime, level: int) -> datetime:
    """Return when all messages that are in a level now will be due: 2**level s in it, and less in those below."""
    return now + timedelta(seconds=(1 << (level + 1)) - 1)


def _count(count: int | None) -> str:
    return "unknown" if count is None else f"{count:,}"


def _time(moment: datetime) -> str:
    return moment.isoformat(sep=" ", timespec="seconds")


#: By how much two clocks may differ, or a broker be late, before a header's time counts as one of an earlier publish.
TOLERANCE = timedelta(seconds=2)
_SECOND = timedelta(seconds=1)
_KEY_LENGTH = 2 * levels.BITS
_LONGEST = timedelta(seconds=levels.MAX_DELAY_SECONDS)


@dataclass(frozen=True, slots=True)
class Reading:
    """The destination and the due time that a message states.

    :param destination: None if it states none.
    :param due_at: in UTC; with a problem the latest time at which its level could deliver it, if that is known.
    :param problem: why the message cannot be moved; None if it can.
    """

    destination: str | None
    due_at: datetime | None
    problem: str | None = None


def split_key(key: str) -> tuple[int, str] | None:
    """Return the delay in seconds and the destination of a routing key; None if it is not the key of a delay."""
    head, destination = key[:_KEY_LENGTH], key[_KEY_LENGTH:]
    if len(head) < _KEY_LENGTH or not destination or set(head[1::2]) != {"."} or not set(head[::2]) <= {"0", "1"}:
        return None
    return int(head[::2], 2), destination


def read(found: BasicProperties, key: str, *, topology: Topology, level: int, now: datetime) -> Reading:
    """Read a message taken from the queue of a level.

    The destination comes from its routing key, by which the broker routes it, else from this package's header. Its due
    time is never early if one of the times in it belongs to its last publish into the levels. It is:

    - the absolute due time in this package's header; NServiceBus's delay after the time it was sent or scheduled as a
      delayed retry (that may lie up to 1 s after the requested time, as NServiceBus rounds up); Celery's ``eta``; of
      several the last;
    - by the broker's clock, when it left the level above, and the delay of the remaining bits: up to 2 s late, and
      never before what the levels below guarantee. It counts where the headers state no time, or an earlier one by more
      than 2 s;
    - else the AMQP timestamp and the delay, up to 2 s late, where that is later than the time of the headers by more
      than its own rounding;
    - where all of these are older than what its level guarantees (it has to wait at least the levels below), the
      remaining delay with all of this level: late by up to its 2**level seconds.

    A message that states none of these has a problem, as has one without a destination.

    :param level: of the queue it was taken from.
    :param now: when it was taken, in UTC.
    """
    headers: Mapping[str, Any] = found.headers or {}
    split = split_key(key) or split_key(_text(headers.get(ORIGINAL_KEY)) or "")
    if split is None:
        destination, due = _text(headers.get(DESTINATION)), _moment(headers.get(DUE_AT), DUE_AT)
        if destination is None:
            return Reading(None, due, "neither its routing key nor a header tells its destination")
        return Reading(destination, due, None if due else "no header tells when it is due")
    delay, destination = split
    below = timedelta(seconds=delay & ((1 << level) - 1))
    this = timedelta(seconds=1 << level)
    stated, exact = list(_stated(headers, timedelta(seconds=delay))), _moment(headers.get(DUE_AT), DUE_AT)
    left = _left_above(headers, topology, level, delay)
    if left is not None:
        due = _last(stated, exact)
        by_broker = max(_add(left, _SECOND + this + below) or now, now + below)
        return Reading(destination, by_broker if due is None or due < by_broker - TOLERANCE else due)
    sent = _timestamp(found, timedelta(seconds=delay))

    def may_be(due: datetime | None) -> bool:
        return due is not None and now + below - TOLERANCE <= due <= now + _LONGEST + TOLERANCE

    due = _last(list(filter(may_be, stated)), exact if may_be(exact) else None)
    if sent is not None and may_be(sent) and (due is None or (due < sent and not _same(due, sent, delay, now))):
        due = sent
    if due is not None:
        return Reading(destination, due)
    return Reading(destination, _add(now, this + below), None if stated or sent else _NO_TIME)


def read_waited(found: BasicProperties, key: str, *, now: datetime) -> Reading:
    """Read a message that no destination took, or one from the parking lot.

    A message that came out of the levels, which its routing key shows, has waited: it is due unless this package's
    header states a later time. Any other message has to have that header.
    """
    headers: Mapping[str, Any] = found.headers or {}
    original = _text(headers.get(ORIGINAL_KEY))
    real = split_key(key)
    split = real or split_key(original or "")
    destination = split[1] if split else _text(headers.get(DESTINATION))
    due = _moment(headers.get(DUE_AT), DUE_AT)
    if due is None and real:
        due = now
    if destination is None:
        return Reading(None, due, "neither its routing key nor a header tells its destination")
    return Reading(destination, due, None if due else "no header tells when it is due")


_NO_TIME = "no header tells when it is due"


def _stated(headers: Mapping[str, Any], delay: timedelta) -> Iterator[datetime]:
    """Yield the due times that senders' headers state."""
    exact = _moment(headers.get(DUE_AT), DUE_AT)
    if exact is not None:
        yield exact
    # another delay than the routing key's is from an earlier way
    if headers.get(NSERVICEBUS_DELAY) == delay // _SECOND:
        sent = [parse_nservicebus_time(headers.get(name)) for name in (NSERVICEBUS_TIME_SENT, NSERVICEBUS_RETRIED)]
        times = [due for each in sent if each is not None and (due := _add(each, delay)) is not None]
        if times:
            rounded, precise = max(times), parse_nservicebus_time(headers.get(DELIVER_AT))
            # further apart, the header is of an earlier delivery, or of another clock
            near = precise is not None and timedelta() <= rounded - precise < _SECOND
            yield precise if precise is not None and near else rounded
    # celery/app/amqp.py: as_task_v2; a countdown becomes an eta too
    if "task" in headers:
        eta = _moment(headers.get("eta"), "eta")
        if eta is not None:
            yield eta


def _last(stated: list[datetime], exact: datetime | None) -> datetime | None:
    """Return the last of several times; the exact one if both are the same but for the rounding of a delay."""
    if not stated:
        return None
    last = max(stated)
    return exact if exact is not None and last - exact < _SECOND else last


def _same(due: datetime, sent: datetime, delay: int, now: datetime) -> bool:
    """Whether two times are equal but for the rounding of the AMQP timestamp and of the delay.

    Both together are less than 2 s. If the message was due before it was sent again, the two can be that close only for
    a delay of 1 s, and the time is past by now.
    """
    return sent - due < 2 * _SECOND and (delay > 1 or due > now)


def _left_above(headers: Mapping[str, Any], topology: Topology, level: int, delay: int) -> datetime | None:
    """Return when a message left the level above, by the newest entry of ``x-death``; None if that is not certain.

    An entry that counts several deaths has the time of the first. A death for another reason than the level's time to
    live (a queue's delivery limit) let the message out early.
    """
    above = delay >> (level + 1)
    deaths = headers.get("x-death")
    if not above or not isinstance(deaths, list) or not all(isinstance(death, dict) for death in deaths) or not deaths:
        return None
    level_above = level + 1 + (above & -above).bit_length() - 1
    newest, time = deaths[0], deaths[0].get("time")
    if newest.get("queue") != topology.level_name(level_above) or newest.get("count") != 1:
        return None
    ours = {topology.level_name(each) for each in range(levels.BITS)}
    # a header from another program may have a name of any type, even an unhashable one
    if any(death.get("reason") != "expired" for death in deaths if str(death.get("queue")) in ours):
        return None
    if not isinstance(time, datetime):
        return None
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(timezone.utc)


def _timestamp(found: BasicProperties, delay: timedelta) -> datetime | None:
    # a whole second, so up to one is missing
    if not isinstance(found.timestamp, int):
        return None
    try:
        return EPOCH + timedelta(seconds=found.timestamp + 1) + delay
    except OverflowError:
        return None


def _moment(value: object, name: str) -> datetime | None:
    try:
        return parse_moment(name, value)
    except InvalidMessage:
        return None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _add(moment: datetime, span: timedelta) -> datetime | None:
    try:
        return moment + span
    except OverflowError:
        return None
