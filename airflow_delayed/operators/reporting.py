"""What a send reports: log lines, its XCom, and its asset events. Never a body or a header's value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import Asset
from airflow.sdk.definitions.asset import AssetRef

from airflow_delayed.compat import AirflowSkipException
from airflow_delayed.delivery import DelayStore, Delivery, State, TopologyReport
from airflow_delayed.errors import DestinationMissing, InputError, TopologyError
from airflow_delayed.message import DelayedMessage
from airflow_delayed.sending import Log, Sending
from airflow_delayed.store.handover import explained
from airflow_delayed.survey import Survey

if TYPE_CHECKING:
    from airflow.sdk import Context

#: How many destinations an event names, those with the most messages; the others are counted.
NAMED = 100


def log_preflight(log: Log, conn_id: str, source: str, found: Survey) -> None:
    """Log the counts of the first pass over all rows."""
    log.info(
        "checked %s rows of %s: %s for connection %s at once, %s to hold in the store; among them %s copies of others"
        " and %s past due",
        f"{found.rows:,}",
        source,
        f"{found.direct.sent:,}",
        conn_id,
        f"{found.held.sent:,}",
        f"{len(found.repeats.copies):,}",
        f"{found.past_due:,}",
    )


def report_empty(log: Log, on_empty: str, rows: int) -> None:
    """Report that there is nothing to send: as a warning, an error or a skipped task.

    :raises InputError: that is an error.
    :raises AirflowSkipException: that skips the task.
    """
    text = f"there is nothing to send: {rows:,} rows were read"
    if on_empty == "fail":
        raise InputError(f"{text}; if that may be, pass on_empty='warn' or 'skip'")
    if on_empty == "skip":
        raise AirflowSkipException(text)
    log.warning(text)


def require_ready(conn_id: str, report: TopologyReport) -> None:
    """Check that destinations and transport are there; what only blocks messages for a while is no error.

    :raises DestinationMissing: a destination does not exist.
    :raises TopologyError: the transport lacks what it needs.
    """
    if report.missing_destinations:
        raise DestinationMissing(
            conn_id,
            report.missing_destinations,
            f"create it, or run TopologyInstallOperator(conn_id={conn_id!r}, destinations=[...],"
            " create_destinations=True). Nothing was sent",
        )
    if report.unready:
        raise TopologyError(conn_id, report)


def log_warnings(log: Log, delivery: Delivery, report: TopologyReport, found: Survey) -> None:
    """Warn of conditions that do not stop a send, and that its user should know before it."""
    for finding in report:
        if finding.state in (State.WARNING, State.BLOCKED):
            log.warning("%s", finding)
        elif finding.state is State.UNKNOWN:
            log.info("%s", finding)
    if advice := delivery.advice(found.far, found.far_delays):
        log.warning("%s", advice)


def log_outcome(log: Log, what: str, sending: Sending) -> None:
    """Log how many messages were sent, and how many are in the store."""
    sent, held = sending.sent, sending.held
    extra = f", {held.replaced:,} replaced there" if held.replaced else ""
    if held.refused:
        extra += f", {held.refused:,} not replaced, for they came too late or were cancelled"
    if sending.start.rows:
        extra += f"; beside the {sending.start.messages:,} of earlier tries"
    log.info("%s: %s sent, %s held in the store%s", what, f"{sent.sent:,}", f"{held.sent:,}", extra)


def warn_without_dispatcher(log: Log, store: DelayStore, conn_id: str, held: int, hold_over: timedelta) -> None:
    """Warn if the store has messages and no dispatcher works: no error, for one may be started yet."""
    if not held:
        return
    try:
        seen = store.last_seen()
        late = seen is None or store.now() - seen > hold_over
    except Exception as error:
        # the messages are in the store, whether or not a dispatcher can be seen
        log.warning("whether a dispatcher comes for what is held could not be told: %s", explained(error))
        return
    if late:
        when = "no dispatcher was there within a day" if seen is None else f"the last dispatcher was there at {seen}"
        log.warning(
            "%s messages are held for connection %r, and %s: let a StoreDispatchOperator with this connection in its"
            " deliver_conn_ids run at least every %s",
            f"{held:,}",
            conn_id,
            when,
            hold_over,
        )


def log_plan(log: Log, sending: Sending, sample: Sequence[DelayedMessage], now: datetime) -> None:
    """Log the destinations and due times of a dry run."""
    sent, held = sending.sent.by_destination, sending.held.by_destination
    for destination in sorted({*sent, *held}):
        log.info(
            "would send to %s: %s at once, %s through the store",
            destination,
            f"{sent.get(destination, 0):,}",
            f"{held.get(destination, 0):,}",
        )
    for message in sample:
        log.info(
            "such as %s to %s, due %s (in %s), %s bytes, %s",
            message.message_id,
            message.destination,
            message.due_at.isoformat(),
            max(message.due_at - now, timedelta(0)),
            f"{len(message.body):,}",
            "held in the store first" if sending.route.holds(message, now) else "at once",
        )


def summary_of(sending: Sending, found: Survey, set_aside: int, *, dry_run: bool) -> dict[str, Any]:
    """Return the counts of all tries, and the first and last due time."""
    reports = (sending.earlier, sending.sent, sending.held)
    dues = [due for report in reports for due in (report.first_due, report.last_due) if due is not None]
    total = sending.start.after(found.rows, sending.sent, sending.held)
    return {
        "sent": total.sent,
        "held": total.held,
        "replaced": total.replaced,
        "refused": total.refused,
        "duplicates": len(found.repeats.copies) + total.duplicates,
        "set_aside": set_aside,
        "skipped": sending.skipped,
        "earlier_tries": sending.start.messages,
        "first_due": min(dues).isoformat() if dues else None,
        "last_due": max(dues).isoformat() if dues else None,
        **({"dry_run": True} if dry_run else {}),
    }


def describe_events(context: Context, outlets: Iterable[object], sending: Sending, summary: Mapping[str, Any]) -> None:
    """Put the summary, and ``destinations`` with their counts, into the extra of each outlet's event.

    With more than 100 destinations, ``other_destinations`` says how many are not named. An alias has no event of its
    own. Messages of earlier tries count if they were confirmed, even if the store already had them.
    """
    counts: dict[str, int] = {}
    for report in (sending.earlier, sending.sent, sending.held):
        for name, count in report.by_destination.items():
            counts[name] = counts.get(name, 0) + count
    most = sorted(counts, key=lambda name: (-counts[name], name))[:NAMED]
    extra = {**summary, "destinations": {name: counts[name] for name in most}}
    if len(counts) > NAMED:
        extra["other_destinations"] = len(counts) - NAMED
    add_to_events(context, outlets, extra)


def add_to_events(context: Context, outlets: Iterable[object], extra: Mapping[str, Any]) -> None:
    """Put values into the extra of each outlet's event."""
    for outlet in outlets:
        if isinstance(outlet, Asset | AssetRef):
            context["outlet_events"][outlet].extra.update(extra)
