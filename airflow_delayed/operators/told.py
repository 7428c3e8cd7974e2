"""What a send tells: lines of the log, and the summary that becomes its XCom. Never a body or a header's value."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from airflow_delayed.delivery import Adviser, DelayedDelivery, HoldingStore, State, TopologyReport
from airflow_delayed.message import DelayedMessage
from airflow_delayed.sending import Log, Sending
from airflow_delayed.store.handover import explained
from airflow_delayed.survey import Survey


def checked(log: Log, conn_id: str, source: str, found: Survey) -> None:
    """Tell what the first look at all rows found."""
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


def doubts(log: Log, delivery: DelayedDelivery, report: TopologyReport, found: Survey) -> None:
    """Warn of what does not keep messages from being sent, and is better known before."""
    for finding in report:
        if finding.state in (State.WARNING, State.BLOCKED):
            log.warning("%s", finding)
        elif finding.state is State.UNKNOWN:
            log.info("%s", finding)
    if isinstance(delivery, Adviser) and (advice := delivery.advice(found.far, found.far_delays)):
        log.warning("%s", advice)


def done(log: Log, what: str, sending: Sending) -> None:
    """Tell what became of the messages."""
    sent, held = sending.sent, sending.held
    extra = f", {held.replaced:,} replaced there" if held.replaced else ""
    if held.refused:
        extra += f", {held.refused:,} not replaced, for they came too late or were cancelled"
    if sending.start.rows:
        extra += f"; beside the {sending.start.messages:,} of earlier tries"
    log.info("%s: %s sent, %s held in the store%s", what, f"{sent.sent:,}", f"{held.sent:,}", extra)


def unvisited(log: Log, store: HoldingStore, conn_id: str, held: int, hold_over: timedelta) -> None:
    """Warn if messages are held and nobody comes for them: no error, for a dispatcher may be started yet."""
    if not held:
        return
    try:
        seen = store.last_seen()
        late = seen is None or store.now() - seen > hold_over
    except Exception as error:
        # they are held, whatever can be told of dispatchers
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


def plan(log: Log, sending: Sending, sample: Sequence[DelayedMessage], now: datetime) -> None:
    """Tell what would go where and when."""
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


def summary(sending: Sending, found: Survey, set_aside: int, *, dry_run: bool) -> dict[str, Any]:
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
