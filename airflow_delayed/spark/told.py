"""What the driver tells in its log when all is sent, or when it failed. Never a body or a header's value."""

from __future__ import annotations

from collections.abc import Sequence

from airflow_delayed.sending import Log
from airflow_delayed.spark.attempts import Lost
from airflow_delayed.spark.counts import NAMED, Counts, total
from airflow_delayed.spark.options import Settings


def committed(log: Log, settings: Settings, done: Sequence[tuple[int, Counts]], lost: Lost | None) -> None:
    """Tell of a job that succeeded.

    :param done: of each partition how many attempts came before the one that succeeded, and its counts.
    :param lost: what attempts without success told; None: they had no place to tell.
    """
    counts = total(one for _, one in done)
    what = "dry run, so nothing was sent; there would be" if settings.dry_run else "all confirmed:"
    log.info(
        "%s %s sent by connection %s and %s stored, of %s rows; %s were there already, %s replaced, %s came too late to"
        " replace, %s past due and skipped",
        what,
        f"{counts.sent.sent:,}",
        settings.deliver,
        f"{counts.held.sent:,}",
        f"{counts.rows:,}",
        f"{counts.sent.duplicates + counts.held.duplicates:,}",
        f"{counts.held.replaced:,}",
        f"{counts.held.refused:,}",
        f"{counts.skipped:,}",
    )
    _destinations(log, counts)
    again = sum(1 for earlier, _ in done if earlier)
    if again and not settings.dry_run:
        log.warning("%s partitions succeeded only after another attempt at them. %s", f"{again:,}", _twice(lost))
    elif lost is not None and lost.attempts:
        log.warning("there was more than one attempt at some partitions. %s", _twice(lost))


def aborted(log: Log, settings: Settings, done: Sequence[Counts], partitions: int, lost: Lost | None) -> None:
    """Tell of a job that failed what cannot be recalled."""
    if settings.dry_run:
        return
    counts = total(done)
    _destinations(log, counts)
    log.warning(
        "the job failed. %s of %s partitions had been sent in full: %s messages by connection %s, which cannot be"
        " recalled, and %s in the store, where they can be cancelled. %s. The same job again means the same messages"
        " if it is given the same anchor and scope, or its rows have ids",
        f"{len(done):,}",
        f"{partitions:,}",
        f"{counts.sent.sent:,}",
        settings.deliver,
        f"{counts.held.sent + counts.held.replaced:,}",
        _others(lost),
    )


def _destinations(log: Log, counts: Counts) -> None:
    by_destination = counts.by_destination()
    for name, count in list(by_destination.items())[:NAMED]:
        log.info("%s: %s", name, f"{count:,}")
    if len(by_destination) > NAMED:
        log.info("and %s other destinations", f"{len(by_destination) - NAMED:,}")


def _twice(lost: Lost | None) -> str:
    return f"{_others(lost)}. A broker's consumers get that once more, with the same ids; a store has nothing twice"


def _others(lost: Lost | None) -> str:
    if lost is None:
        return (
            "What other attempts had sent is told by their own errors, and not known where they were killed: the option"
            " attempts names a folder for it"
        )
    if not lost.attempts:
        return "No other attempt told that it had sent anything; one that was killed may have, before it could tell"
    least = "" if lost.exact else "at least "
    named = ", ".join(f"{count:,} to {name}" for name, count in list(lost.counts.by_destination().items())[:NAMED])
    return (
        f"{lost.attempts:,} other attempts had sent {least}{lost.counts.sent.sent:,} messages and stored"
        f" {least}{lost.counts.held.sent + lost.counts.held.replaced:,}{f' ({named})' if named else ''}"
    )
