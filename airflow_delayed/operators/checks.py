"""What a DelayedSendOperator checks before the first message is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_delayed.addresses import shown
from airflow_delayed.compat import AirflowSkipException
from airflow_delayed.errors import DestinationMissing, InputError, TopologyError
from airflow_delayed.intake.rows import Problem
from airflow_delayed.operators import reporting
from airflow_delayed.operators.given import rejects_of
from airflow_delayed.route import Route
from airflow_delayed.sending import Sending
from airflow_delayed.survey import Survey

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_delayed.operators.send import DelayedSendOperator


def survey(operator: DelayedSendOperator, context: Context, sending: Sending, route: Route) -> tuple[Survey, int]:
    """Check everything, and return what was found and how many rows were set aside.

    :raises InputError: something is wrong with the source, with rows, or with what they say together.
    :raises DestinationMissing: a destination does not exist.
    :raises TopologyError: a transport, or the store, lacks what it needs.
    :raises AirflowSkipException: there is nothing to send, and that skips the task.
    """
    if operator.rejects is not None and not operator.only_plan:
        with rejects_of(operator, context) as rejects:
            if rejects.moved_to:
                operator.log.warning("the rows that an earlier run set aside are in %s now", shown(rejects.moved_to))
            found = sending.survey(set_aside=rejects.add)
        set_aside = rejects.count
        if set_aside:
            operator.log.warning("%s rows cannot be sent and are in %s", f"{set_aside:,}", shown(rejects.path))
    else:
        aside: list[Problem] = []
        found = sending.survey(set_aside=None if operator.rejects is None else aside.append)
        set_aside = len(aside)
    reporting.log_preflight(operator.log, operator.conn_id, sending.source.name, found)
    _check_empty(operator, found)
    _verify(operator, found, route)
    return found, set_aside


def _check_empty(operator: DelayedSendOperator, found: Survey) -> None:
    if found.direct.sent + found.held.sent:
        return
    text = f"there is nothing to send: {found.rows:,} rows were read"
    if operator.on_empty == "fail":
        raise InputError(f"{text}; if that may be, pass on_empty='warn' or 'skip'")
    if operator.on_empty == "skip":
        raise AirflowSkipException(text)
    operator.log.warning(text)


def _verify(operator: DelayedSendOperator, found: Survey, route: Route) -> None:
    if not found.destinations:
        return
    # some of what is held now may be near by the time it is sent
    longest = max(found.longest, route.hold_over) if found.held.sent else found.longest
    report = route.delivery.verify(found.destinations, max_delay=longest)
    if report.missing_destinations:
        raise DestinationMissing(
            operator.conn_id,
            report.missing_destinations,
            f"create it, or run TopologyInstallOperator(conn_id={operator.conn_id!r}, destinations=[...],"
            " create_destinations=True). Nothing was sent",
        )
    # what only blocks passes, and the messages wait until then
    if report.unready:
        raise TopologyError(operator.conn_id, report)
    reporting.log_warnings(operator.log, route.delivery, report, found)
    if route.store is not None and not route.holds_all:
        report = route.store.verify(())
        if not report.ok:
            raise TopologyError(str(operator.store_conn_id), report)
