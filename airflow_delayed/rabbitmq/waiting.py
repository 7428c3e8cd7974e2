"""What waits where: messages by level, with the time span in which they fall due."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from airflow_delayed.rabbitmq import levels
from airflow_delayed.rabbitmq.facts import QueueFacts
from airflow_delayed.rabbitmq.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelWaiting:
    """What waits in one level."""

    level: int
    queue: str
    #: Messages that wait, the stuck among them; where those are unknown, without them. None: the queue is missing.
    messages: int | None
    #: Messages that are due to go on and could not; None: unknown.
    stuck: int | None
    #: When the next of them may fall due, and by when the last will have: now, and 2**(level + 1) - 1 s later.
    earliest: datetime
    latest: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """What waits in a topology, looked at in one moment; ``str()`` of it is a small table for a log.

    Messages move on meanwhile, and the number of the stuck is up to 5 s old.
    """

    at: datetime
    levels: tuple[LevelWaiting, ...]
    #: The queue for what no destination took.
    unroutable_queue: str
    #: How many messages are in it; None: there is no such queue.
    unroutable: int | None
    #: Why stuck messages could not be counted; None if they were.
    why_unknown: str | None = None

    @property
    def messages(self) -> int:
        """All that wait in the levels; the least there can be, if ``stuck`` is unknown."""
        return sum(level.messages or 0 for level in self.levels)

    @property
    def stuck(self) -> int | None:
        """All that are stuck; None if that is unknown of a level."""
        known = [level.stuck for level in self.levels if level.stuck is not None]
        return sum(known) if len(known) == sum(level.messages is not None for level in self.levels) else None

    @property
    def missing(self) -> tuple[str, ...]:
        """Level queues that do not exist."""
        return tuple(level.queue for level in self.levels if level.messages is None)

    def __str__(self) -> str:
        header = ("queue", "messages", "stuck", "due from", "due by")
        rows = [
            (level.queue, _count(level.messages), _count(level.stuck), _time(level.earliest), _time(level.latest))
            for level in self.levels
            if level.messages or level.stuck
        ]
        least = "at least " if self.stuck is None else ""
        rows.append(("all levels", f"{least}{self.messages:,}", _count(self.stuck), "", ""))
        unroutable = "no such queue" if self.unroutable is None else _count(self.unroutable)
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
            lines.append(f"messages stuck in dead-lettering are not counted: {self.why_unknown}")
        return "\n".join(lines)


def waiting(
    topology: Topology,
    now: datetime,
    counts: Mapping[str, int | None],
    queues: Mapping[str, QueueFacts] | None,
    why: str | None = None,
) -> Waiting:
    """Put together what AMQP and the management API counted.

    A passive declare's count leaves out what is stuck in dead-lettering, so the two are added.

    :param counts: what AMQP counts in each queue; None for one that is missing.
    :param queues: the management API's list; None without it, and ``why`` says the reason.
    """
    found = []
    for level in range(levels.BITS):
        name = topology.level_name(level)
        ready = counts.get(name)
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
    unseen = any(level.stuck is None and level.messages is not None for level in found)
    return Waiting(
        at=now,
        levels=tuple(found),
        unroutable_queue=topology.unroutable_queue,
        unroutable=counts.get(topology.unroutable_queue),
        why_unknown=(why if queues is None else "the broker has no statistics of some queues (yet)")
        if unseen
        else None,
    )


def latest(now: datetime, level: int) -> datetime:
    """Return by when all that is in a level now will be due: it waits 2**level s there, and less below."""
    return now + timedelta(seconds=(1 << (level + 1)) - 1)


def _count(count: int | None) -> str:
    return "unknown" if count is None else f"{count:,}"


def _time(moment: datetime) -> str:
    return moment.isoformat(sep=" ", timespec="seconds")
