"""What became of messages that were to be moved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from airflow_delayed.errors import some


@dataclass(slots=True)
class MoveReport:
    """What ``migrate`` or ``redrive`` did, or with ``dry_run`` found.

    :param source: where the messages were taken from, in words.
    :param target: where they were sent.
    :param moved: how many were confirmed by the target and removed from the source.
    :param by_destination: the same by destination.
    :param by_queue: the same by the queue they were taken from.
    :param set_aside: how many were put into the queue ``delayed.set-aside``, by reason.
    :param left: how many were put back at the end of their queue, by reason.
    :param waiting: how many were there at the start, by queue; empty queues are left out.
    :param destinations: of a dry run of ``redrive``: how many messages there are, by destination.
    :param problems: destinations to which nothing would be sent, each with the reason.
    """

    source: str
    target: str
    dry_run: bool = False
    moved: int = 0
    by_destination: dict[str, int] = field(default_factory=dict)
    by_queue: dict[str, int] = field(default_factory=dict)
    set_aside: dict[str, int] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, int] = field(default_factory=dict)
    destinations: dict[str, int] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    def add(self, destination: str, queue: str) -> None:
        """Count a message that was moved."""
        self.moved += 1
        _count(self.by_destination, destination)
        _count(self.by_queue, queue)

    def add_destination(self, destination: str, problem: str | None) -> None:
        """Count a message that would be moved, or would not for a reason that holds for its destination."""
        _count(self.destinations, destination)
        if problem is not None:
            self.problems[destination] = problem

    def add_set_aside(self, reason: str) -> None:
        """Count a message that was set aside."""
        _count(self.set_aside, reason)

    def add_left(self, reason: str) -> None:
        """Count a message that was put back."""
        _count(self.left, reason)

    def __str__(self) -> str:
        waiting = f"{_total(self.waiting):,} waiting{_list(self.waiting)}"
        if self.dry_run:
            parts = [f"from {self.source} to {self.target}: would move up to {waiting}"]
            good = {name: count for name, count in self.destinations.items() if name not in self.problems}
            bad = {self.problems[name]: count for name, count in self.destinations.items() if name in self.problems}
            if good:
                parts.append(f"would send{_list(good)}")
            if bad or self.left:
                parts.append(f"would leave{_list(bad | self.left)}")
            return "; ".join(parts)
        parts = [f"from {self.source} to {self.target}: moved {self.moved:,}{_list(self.by_destination)}"]
        if self.set_aside:
            parts.append(f"set aside {_total(self.set_aside):,}{_list(self.set_aside)}")
        if self.left:
            parts.append(f"left {_total(self.left):,}{_list(self.left)}")
        return "; ".join(parts)


def _count(counts: dict[str, int], name: str) -> None:
    counts[name] = counts.get(name, 0) + 1


def _total(counts: Mapping[str, int]) -> int:
    return sum(counts.values())


def _list(counts: Mapping[str, int]) -> str:
    return f" ({some([f'{name}: {count:,}' for name, count in counts.items()], separator=', ')})" if counts else ""
