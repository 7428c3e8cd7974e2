"""The numbers of the messages that wait, by level."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from airflow_delayed.delivery import Finding
from airflow_delayed.rabbitmq import cluster
from airflow_delayed.rabbitmq.management import Facts
from airflow_delayed.rabbitmq.topology import Topology


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
    #: When the first of them may fall due, and when the last will have: now, and after the waits of this level and of
    #: all below.
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
    names = [*topology.level_names(), topology.unroutable_queue]
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
            stuck = (known.stuck if known else None) if topology.quorum else 0
        found.append(
            LevelWaiting(
                level=level,
                queue=name,
                messages=None if ready is None else ready + (stuck or 0),
                stuck=stuck,
                earliest=now,
                latest=now + timedelta(seconds=topology.digits.longest(level)),
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


def _count(count: int | None) -> str:
    return "unknown" if count is None else f"{count:,}"


def _time(moment: datetime) -> str:
    return moment.isoformat(sep=" ", timespec="seconds")
