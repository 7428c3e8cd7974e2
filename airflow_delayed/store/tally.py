"""Counting what a dispatcher does, and telling it in the log."""

from __future__ import annotations

import logging
from collections.abc import Callable

from airflow_delayed.store.report import DispatchReport
from airflow_delayed.store.settling import Verdict, shortened

log = logging.getLogger(__name__)

Meter = Callable[[str, Verdict], object]
#: How many reasons are kept for the error of a run.
KEPT_REASONS = 1000


class Tally:
    """The counts of one connection.

    :param meter: is told the connection and each batch that is settled, from whichever thread settled it.
    """

    def __init__(self, conn_id: str, meter: Meter | None = None) -> None:
        self.report = DispatchReport()
        self.failures: dict[str, str] = {}
        self._conn_id = conn_id
        self._meter = meter

    def take(self) -> tuple[DispatchReport, dict[str, str]]:
        """Return the counts, and the reasons of what was given up, and begin anew."""
        taken = self.report, self.failures
        self.report, self.failures = DispatchReport(), {}
        return taken

    def add(self, verdict: Verdict) -> None:
        """Count what is settled."""
        report = self.report
        if self._meter is not None:
            self._meter(self._conn_id, verdict)
        if verdict.gone:
            dues = [row["Time"] for row in verdict.gone]
            report.add_all(self._conn_id, len(dues), min(dues), max(dues))
        report.retried += len(verdict.again)
        report.failed += len(verdict.failed)
        report.expired += len(verdict.expired)
        report.error_destination += len(verdict.aside)
        for row, reason in verdict.failed[: KEPT_REASONS - len(self.failures)]:
            self.failures[row["Id"]] = reason
        if verdict.again:
            one = min(verdict.again, key=lambda one: one.next_try)
            self._warn(
                f"{len(verdict.again):,} messages are tried again, the first at {one.next_try:%H:%M:%S} UTC:"
                f" {shortened(one.row['Id'])}: {one.reason}"
            )
        if verdict.aside:
            self._warn(
                f"{len(verdict.aside):,} messages went to the error destination, such as"
                f" {shortened(verdict.aside[0]['Id'])}"
            )
        if verdict.failed:
            row, reason = verdict.failed[0]
            self._warn(f"{len(verdict.failed):,} messages are given up, such as {shortened(row['Id'])}: {reason}")

    def _warn(self, text: str) -> None:
        log.warning("connection %r: %s", self._conn_id, text)
