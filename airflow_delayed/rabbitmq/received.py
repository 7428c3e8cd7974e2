"""Reading where a message that waits is to go and when it is due, from what it carries. No network.

Nothing is peeked at or guessed early: of several times that a message tells the latest one counts, of those that are
not provably old; where all are, the latest time at which its level could deliver it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from airflow_delayed.errors import InvalidMessage
from airflow_delayed.message import EPOCH, UTC, parse_moment
from airflow_delayed.rabbitmq import levels, nservicebus
from airflow_delayed.rabbitmq.properties import DESTINATION, DUE_AT, ORIGINAL_KEY
from airflow_delayed.rabbitmq.topology import Topology

if TYPE_CHECKING:
    from pika import BasicProperties

#: By how much two clocks may differ, or a broker be late, before a header's time counts as that of an earlier way.
TOLERANCE = timedelta(seconds=2)
_SECOND = timedelta(seconds=1)
_KEY_LENGTH = 2 * levels.BITS
_LONGEST = timedelta(seconds=levels.MAX_DELAY_SECONDS)


@dataclass(frozen=True, slots=True)
class Reading:
    """What a message tells.

    :param destination: None if it tells none.
    :param due_at: in UTC; with a problem the latest time at which its level could deliver it, if that is known.
    :param problem: why the message cannot be moved; None if it can.
    """

    destination: str | None
    due_at: datetime | None
    problem: str | None = None


def split_key(key: str) -> tuple[int, str] | None:
    """Return the delay in seconds and the destination that a routing key tells; None if it is not a delay's."""
    head, destination = key[:_KEY_LENGTH], key[_KEY_LENGTH:]
    if len(head) < _KEY_LENGTH or not destination or set(head[1::2]) != {"."} or not set(head[::2]) <= {"0", "1"}:
        return None
    return int(head[::2], 2), destination


def read(found: BasicProperties, key: str, *, topology: Topology, level: int, now: datetime) -> Reading:
    """Read a message taken from the queue of a level.

    The destination is that of its routing key, by which the broker goes, else that of our headers. Its due time, never
    early if one of the times that it carries is that of its last way into the levels:

    - our header's absolute due time; NServiceBus's delay after the time it was sent or scheduled as a delayed retry
      (that may lie up to 1 s later than what was asked for, as NServiceBus rounds up); Celery's ``eta``; of several
      the last;
    - by the broker's clock, when it left the level above and what the bits say that is left: up to 2 s late, and never
      before what the levels below guarantee. It counts where the headers tell an earlier time than that, by more than
      2 s, or none;
    - else the AMQP timestamp and the delay, up to 2 s late, where that is later than what the headers tell by more
      than its own rounding;
    - where all of these are older than what its level guarantees (it has to wait at least the levels below), the
      remaining delay with all of this level: late by up to its 2**level seconds.

    A message that tells none of these has a problem, as has one without a destination.

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
    told, ours = list(_senders(headers, timedelta(seconds=delay))), _moment(headers.get(DUE_AT), DUE_AT)
    left = _left_above(headers, topology, level, delay)
    if left is not None:
        due = _last(told, ours)
        by_broker = max(_add(left, _SECOND + this + below) or now, now + below)
        return Reading(destination, by_broker if due is None or due < by_broker - TOLERANCE else due)
    sent = _timestamp(found, timedelta(seconds=delay))

    def may_be(due: datetime | None) -> bool:
        return due is not None and now + below - TOLERANCE <= due <= now + _LONGEST + TOLERANCE

    due = _last(list(filter(may_be, told)), ours if may_be(ours) else None)
    if sent is not None and may_be(sent) and (due is None or (due < sent and not _same(due, sent, delay, now))):
        due = sent
    if due is not None:
        return Reading(destination, due)
    return Reading(destination, _add(now, this + below), None if told or sent else _UNTOLD)


def read_waited(found: BasicProperties, key: str, *, now: datetime) -> Reading:
    """Read a message that no destination took, or one that was set aside.

    One that came out of the levels, which its routing key shows, has waited: it is due unless our header says later.
    Another one has to have our header.
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


_UNTOLD = "no header tells when it is due"


def _senders(headers: Mapping[str, Any], delay: timedelta) -> Iterator[datetime]:
    """Yield the due times that senders' headers tell."""
    ours = _moment(headers.get(DUE_AT), DUE_AT)
    if ours is not None:
        yield ours
    # of another delay than the routing key's: from an earlier way
    if headers.get(nservicebus.DELAY) == delay // _SECOND:
        sent = [nservicebus.parse_time(headers.get(name)) for name in (nservicebus.TIME_SENT, nservicebus.RETRIED)]
        times = [due for each in sent if each is not None and (due := _add(each, delay)) is not None]
        if times:
            yield max(times)
    # celery/app/amqp.py: as_task_v2; a countdown becomes an eta too
    if "task" in headers:
        eta = _moment(headers.get("eta"), "eta")
        if eta is not None:
            yield eta


def _last(told: list[datetime], ours: datetime | None) -> datetime | None:
    """Return the last of several times; ours, which is exact, if it is the same but for the rounding of a delay."""
    if not told:
        return None
    last = max(told)
    return ours if ours is not None and last - ours < _SECOND else last


def _same(due: datetime, sent: datetime, delay: int, now: datetime) -> bool:
    """Whether the time that the AMQP timestamp tells may be this one, but for its rounding and that of the delay.

    Both together are less than 2 s. One that was due before the message was sent again can be that close only to a
    delay of 1 s, and is past by now.
    """
    return sent - due < 2 * _SECOND and (delay > 1 or due > now)


def _left_above(headers: Mapping[str, Any], topology: Topology, level: int, delay: int) -> datetime | None:
    """Return when a message left the level above, by the newest entry of ``x-death``; None if that is not certain.

    An entry that counts several deaths has the time of the first one. One for another reason than the level's time to
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
    # a name made by hand may be anything, also what no set can be asked for
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
