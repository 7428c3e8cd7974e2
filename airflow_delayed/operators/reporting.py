"""The reports of a send: log lines, its XCom, and its asset events. Never a body or a header's value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import Asset
from airflow.sdk.definitions.asset import AssetRef

from airflow_delayed.compat import AirflowSkipException
from airflow_delayed.delivery import DelayStore, Delivery, Finding, State, TopologyReport
from airflow_delayed.errors import (
    SHOWN,
    DestinationMissing,
    InputError,
    TopologyError,
    TransportUnavailable,
    explained,
    some,
)
from airflow_delayed.message import DelayedMessage
from airflow_delayed.reports import largest_destinations
from airflow_delayed.route import Route, is_away
from airflow_delayed.sending import Log, PreflightReport, Sending

if TYPE_CHECKING:
    from airflow.sdk import Context


def log_preflight(log: Log, conn_id: str, source: str, found: PreflightReport, past_due: str) -> None:
    """Log the counts of the first pass over all rows."""
    stale = f"{found.past_due:,} past due"
    if found.past_due:
        stale += ", which are skipped" if past_due == "skip" else ", which are sent at once"
    log.info(
        "checked %s rows of %s: %s for connection %s at once, %s to store; among them %s duplicates and %s",
        f"{found.rows:,}",
        source,
        f"{found.direct.sent:,}",
        conn_id,
        f"{found.stored.sent:,}",
        f"{len(found.duplicates.copies):,}",
        stale,
    )


def report_empty(log: Log, on_empty: str, rows: int) -> None:
    """Report that there is nothing to send: as a warning, an error or a skipped task."""
    text = f"there is nothing to send: {rows:,} rows were read"
    if on_empty == "fail":
        raise InputError(f"{text}; if that may be, pass on_empty='warn' or 'skip'")
    if on_empty == "skip":
        raise AirflowSkipException(text)
    log.warning(text)


def missing_tables(route: Route) -> TopologyError | None:
    """Return the error of a store that lacks its tables, for the caller to raise; None: it is ready."""
    try:
        if route.store is not None:
            route.store.known(())
    except TopologyError as error:
        return error
    return None


def verify_route(log: Log, conn_id: str, store_conn_id: str | None, route: Route, found: PreflightReport) -> None:
    """Compare the transport and the store with what the messages need, and log what is no error.

    A broker that is away is a warning if messages wait in a store in front of it.
    """
    # messages that go to the store now may be due soon by the time they are sent
    longest = max(found.longest, route.hold_over) if found.stored.sent else found.longest
    reports: dict[str, TopologyReport] = {}
    try:
        reports[conn_id] = route.delivery.verify(found.destinations, max_delay=longest)
    except TransportUnavailable as error:
        if route.holds_all or not found.stored.sent or not is_away(error):
            raise
        log.warning(
            "%s. So it was not checked whether %s can receive: messages wait in store %s, and a dispatcher finds that"
            " when they are due",
            error,
            some(found.destinations, separator=", "),
            store_conn_id,
        )
    if route.store is not None and not route.holds_all:
        reports[str(store_conn_id)] = route.store.verify(())
    require_ready(reports)
    log_warnings(log, route.delivery, reports.pop(conn_id, TopologyReport()), found)
    for report in reports.values():
        log_findings(log, report)


def require_ready(reports: Mapping[str, TopologyReport]) -> None:
    """Check that destinations, transport and store are ready; one error names all that is missing.

    A finding that only blocks messages for a while is no error, such as a destination that is full, or a store without
    a dispatcher: :func:`log_warnings` warns of it.
    """
    problems = [
        _missing_destinations(conn_id, report) if report.missing_destinations else TopologyError(conn_id, report)
        for conn_id, report in reports.items()
        if report.unready
    ]
    if not problems:
        return
    # no retry makes a destination
    first = next((problem for problem in problems if isinstance(problem, InputError)), problems[0])
    first.args = (". And ".join(map(str, problems)) + ". Nothing was sent",)
    raise first


def _missing_destinations(conn_id: str, report: TopologyReport) -> DestinationMissing:
    names = report.missing_destinations
    install = (
        f"TopologyInstallOperator(conn_id={conn_id!r}, destinations={list(names) if len(names) <= SHOWN else '[...]'},"
        " create_destinations=True)"
    )
    others = [str(finding) for finding in report.unready if not finding.destination]
    remedy = (
        f"and is not ready: {some(others)}. {install} makes all of it" if others else f"create it, or run {install}"
    )
    return DestinationMissing(conn_id, names, remedy)


def log_warnings(log: Log, delivery: Delivery, report: TopologyReport, found: PreflightReport) -> None:
    """Warn of conditions that do not stop a send, and that its user should know before it."""
    log_findings(log, report)
    if advice := delivery.advice(found.far, found.far_delays):
        log.warning("%s", advice)
    if warning := next(filter(None, map(delivery.receiver_warning, found.sample)), None):
        log.warning("%s", warning)


def log_findings(log: Log, report: Iterable[Finding]) -> None:
    """Log findings: warnings and what blocks messages as warnings."""
    for finding in report:
        if finding.state in (State.WARNING, State.BLOCKED):
            log.warning("%s", finding)
        elif finding.state is State.UNKNOWN:
            log.info("%s", finding)


def log_outcome(log: Log, what: str, sending: Sending) -> None:
    """Log how many messages were sent, and how many are in the store."""
    sent, stored = sending.sent, sending.stored
    extra = f", {stored.replaced:,} replaced there" if stored.replaced else ""
    if stored.not_replaced:
        extra += f", {stored.not_replaced:,} not replaced, for they came too late or were cancelled"
    if sending.start.rows:
        extra += f"; beside the {sending.start.messages:,} of earlier tries"
    log.info("%s: %s sent, %s stored%s", what, f"{sent.sent:,}", f"{stored.sent:,}", extra)


def warn_without_dispatcher(log: Log, store: DelayStore, conn_id: str, stored: int, hold_over: timedelta) -> None:
    """Warn if the store has messages and no dispatcher works: no error, for one may be started yet."""
    if not stored:
        return
    try:
        seen = store.last_seen()
        late = seen is None or store.now() - seen > hold_over
    except Exception as error:
        # the messages are in the store, whether or not a dispatcher can be seen
        log.warning("the store could not be asked for its dispatchers: %s; the messages are stored", explained(error))
        return
    if late:
        when = "no dispatcher was there within a day" if seen is None else f"the last dispatcher was there at {seen}"
        # a queue table gets its messages at their due time, and not ahead
        own = getattr(store, "conn_id", None) == conn_id
        log.warning(
            "%s messages are stored for connection %r, and %s: let a StoreDispatchOperator with this connection in its"
            " deliver_conn_ids %s",
            f"{stored:,}",
            conn_id,
            when,
            "stay, with until= and deferrable=True" if own else f"run at least every {hold_over}",
        )


def log_plan(log: Log, sending: Sending, sample: Sequence[DelayedMessage], now: datetime) -> None:
    """Log the destinations and due times of a dry run."""
    sent, stored = sending.sent.by_destination, sending.stored.by_destination
    for destination in sorted({*sent, *stored}):
        log.info(
            "would send to %s: %s at once, %s through the store",
            destination,
            f"{sent.get(destination, 0):,}",
            f"{stored.get(destination, 0):,}",
        )
    for message in sample:
        log.info(
            "such as %s to %s, due %s (in %s), %s bytes, %s",
            message.message_id,
            message.destination,
            message.due_at.isoformat(),
            max(message.due_at - now, timedelta(0)),
            f"{len(message.body):,}",
            "stored first" if sending.route.holds(message, now) else "at once",
        )


def summary_of(sending: Sending, found: PreflightReport, *, dry_run: bool) -> dict[str, Any]:
    """Return the counts of all tries, the first and last due time, and ``message_ids``, by which to cancel.

    ``message_ids`` is None of over 100 messages.
    """
    every = sending.earlier + sending.sent + sending.stored
    total = sending.start.after(found.rows, sending.sent, sending.stored)
    return {
        "sent": total.sent,
        "stored": total.stored,
        "replaced": total.replaced,
        "not_replaced": total.not_replaced,
        "duplicates": len(found.duplicates.copies) + total.duplicates,
        "rejected": found.problem_count + sending.refused,
        "skipped": sending.skipped,
        "earlier_tries": sending.start.messages,
        "first_due": every.first_due.isoformat() if every.first_due else None,
        "last_due": every.last_due.isoformat() if every.last_due else None,
        "message_ids": found.message_ids,
        **({"dry_run": True} if dry_run else {}),
    }


def describe_events(context: Context, outlets: Iterable[object], sending: Sending, summary: Mapping[str, Any]) -> None:
    """Put the summary without ids, and ``destinations`` with their counts, into the extra of each outlet's event.

    With more than 100 destinations, ``other_destinations`` says how many are not named. An alias has no event of its
    own. Messages of earlier tries count if they were confirmed, even if the store already had them.
    """
    counts = (sending.earlier + sending.sent + sending.stored).by_destination
    extra = {**summary, **largest_destinations(counts)}
    extra.pop("message_ids", None)
    add_to_events(context, outlets, extra)


def add_to_events(context: Context, outlets: Iterable[object], extra: Mapping[str, Any]) -> None:
    """Put values into the extra of each outlet's event."""
    for outlet in outlets:
        if isinstance(outlet, Asset | AssetRef):
            context["outlet_events"][outlet].extra.update(extra)
