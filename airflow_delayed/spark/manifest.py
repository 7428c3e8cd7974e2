"""The counts of a job as a small JSON file, for the task that started it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from airflow_delayed.errors import SourceError
from airflow_delayed.spark.attempts import Lost
from airflow_delayed.spark.counts import Counts, total
from airflow_delayed.spark.options import Settings

#: Raised when the meaning of a field changes.
VERSION = 1


def manifest_of(settings: Settings, done: Sequence[tuple[int, Counts]], lost: Lost | None) -> dict[str, Any]:
    """Return what the file holds.

    ``version``, ``anchor``, ``partitions``, how many of them were ``repeated``, ``summary``, ``destinations`` (and
    ``other_destinations``); ``other_attempts`` with how many told of themselves besides, what they had sent and
    stored, and whether that is ``exact``,
    or None where they had no place to tell.

    :param done: of each partition how many attempts came before the one that succeeded, and its counts.
    """
    counts, anchor = total(one for _, one in done), settings.rules.anchor
    summary = counts.summary()
    if settings.dry_run:
        summary["dry_run"] = True
    return {
        "version": VERSION,
        "anchor": None if anchor is None else anchor.isoformat(),
        "partitions": len(done),
        "repeated": sum(1 for earlier, _ in done if earlier),
        "summary": summary,
        **counts.destinations(),
        "other_attempts": None
        if lost is None
        else {
            "attempts": lost.attempts,
            "sent": lost.counts.sent.sent,
            "held": lost.counts.held.sent + lost.counts.held.replaced,
            "exact": lost.exact,
        },
    }


def check_manifest(given: Any, place: str) -> Mapping[str, Any]:
    """Return a manifest that was read.

    :raises SourceError: it is none, or of another release.
    """
    if not isinstance(given, dict) or given.get("version") != VERSION or not isinstance(given.get("summary"), dict):
        raise SourceError(
            f"{place} is no manifest of this release: Spark's machines and Airflow's need the same release of"
            " airflow-provider-delayed"
        )
    return given
