"""What became of a task's rows, added up on the driver, and written down as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from airflow_delayed.delivery import SendReport

#: How many destinations are named, those with the most messages; the others are counted.
NAMED = 100


@dataclass(slots=True, kw_only=True)
class Counts:
    """Counts of one attempt at one partition, or of many."""

    rows: int = 0
    #: Rows past due that were passed over.
    skipped: int = 0
    sent: SendReport = field(default_factory=SendReport)
    held: SendReport = field(default_factory=SendReport)

    def merge(self, other: Counts) -> None:
        """Add another's counts."""
        self.rows += other.rows
        self.skipped += other.skipped
        self.sent.merge(other.sent)
        self.held.merge(other.held)

    @property
    def out(self) -> int:
        """Messages that were sent or stored."""
        return self.sent.sent + self.held.sent + self.held.replaced

    def by_destination(self) -> dict[str, int]:
        """Messages that were sent or stored, by destination, most first."""
        counts = dict(self.sent.by_destination)
        for name, count in self.held.by_destination.items():
            counts[name] = counts.get(name, 0) + count
        return {name: counts[name] for name in sorted(counts, key=lambda name: (-counts[name], name))}

    def summary(self) -> dict[str, Any]:
        """Return what DelayedSendOperator returns as well, and ``rows``."""
        dues = [due for report in (self.sent, self.held) for due in (report.first_due, report.last_due) if due]
        return {
            "rows": self.rows,
            "sent": self.sent.sent,
            "held": self.held.sent,
            "replaced": self.held.replaced,
            "refused": self.held.refused,
            "duplicates": self.sent.duplicates + self.held.duplicates,
            "skipped": self.skipped,
            "first_due": min(dues).isoformat() if dues else None,
            "last_due": max(dues).isoformat() if dues else None,
        }

    def destinations(self) -> dict[str, Any]:
        """Return ``destinations`` with the most messages, and how many ``other_destinations`` there are, if any."""
        counts = self.by_destination()
        named = dict(list(counts.items())[:NAMED])
        others = len(counts) - len(named)
        return {"destinations": named, **({"other_destinations": others} if others else {})}

    def to_json(self) -> dict[str, Any]:
        """Return all of it as what JSON can hold."""
        return {"rows": self.rows, "skipped": self.skipped, "sent": _plain(self.sent), "held": _plain(self.held)}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Counts:
        """Return what ``to_json`` wrote."""
        return cls(
            rows=given["rows"], skipped=given["skipped"], sent=_report(given["sent"]), held=_report(given["held"])
        )


def total(counts: Iterable[Counts]) -> Counts:
    """Add counts up."""
    found = Counts()
    for each in counts:
        found.merge(each)
    return found


def _plain(report: SendReport) -> dict[str, Any]:
    return {
        "sent": report.sent,
        "duplicates": report.duplicates,
        "replaced": report.replaced,
        "refused": report.refused,
        "first_due": None if report.first_due is None else report.first_due.isoformat(),
        "last_due": None if report.last_due is None else report.last_due.isoformat(),
        "by_destination": dict(report.by_destination),
    }


def _report(given: Mapping[str, Any]) -> SendReport:
    dues = {name: None if given[name] is None else datetime.fromisoformat(given[name]) for name in _DUES}
    return SendReport(**{**given, **dues})


_DUES = ("first_due", "last_due")
