"""``airflow delayed doctor``: what keeps messages from arriving in time, over several connections at once.

Of each store it also names the dispatchers at work.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

from airflow.utils.cli import suppress_logs_and_warning

from airflow_delayed import config
from airflow_delayed.cli.commands import expected_errors, show
from airflow_delayed.delivery import DelayStore, Finding, State, delivery_for
from airflow_delayed.diagnosis import (
    NO_ANSWER,
    clock_difference,
    frequent_reason,
    grouped,
    last_dags,
    merged,
    no_answer,
    with_paused,
    with_remedies,
)
from airflow_delayed.errors import TopologyError, TransportUnavailable, explained, one_line, some
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.message import utcnow
from airflow_delayed.store.api import DispatcherSeen
from airflow_delayed.threads import in_thread

#: Seconds for all connections, which are examined side by side.
EXAMINE_SECONDS = 15.0
#: Of each connection, so many destinations of a store's messages are verified.
MAX_DESTINATIONS = 100
_DEFINE = "add the connection to Airflow, or correct its name: --conn-id, or deliver_conn_ids of sender and dispatcher"


@suppress_logs_and_warning
def doctor_(args: Namespace) -> None:
    """``airflow delayed doctor``: print the findings, the gravest first; exit code 1 if there are errors."""
    with expected_errors():
        wanted = _wanted(args.conn_id or [], args.destination or [])
    if not wanted:
        raise SystemExit(
            "There is nothing to examine: give --conn-id, or name connections in section [delayed] of Airflow's"
            " configuration (page_stores, page_rabbitmq, page_sqs, deliver_conn_ids)."
        )
    examined = examine(wanted, EXAMINE_SECONDS)
    found = merged(
        ((conn_id, each) for conn_id, one in examined.items() for each in one.findings if each.severity != "ok"),
        lambda cause, follows: replace(cause, why=follows.why or follows.what),
    )
    if args.output in ("json", "yaml"):
        show([{"connection": conn_id, **finding.to_json()} for conn_id, finding in found], args.output)
    else:
        _print(found)
        errors = sum(finding.severity == "error" for _, finding in found)
        for conn_id, examination in examined.items():
            if examination.dispatchers is not None:
                _print_dispatchers(conn_id, examination.dispatchers)
        print(
            f"Connections examined: {', '.join(map(one_line, examined))}. Errors: {errors}, other findings:"
            f" {len(found) - errors}."
        )
    if any(finding.severity == "error" for _, finding in found):
        sys.exit(1)


def _wanted(conn_ids: Sequence[str], destinations: Sequence[str]) -> dict[str, list[str]]:
    """Return the destinations to verify by connection.

    :param conn_ids: none means all that the section ``[delayed]`` of Airflow's configuration names.
    """
    names = conn_ids or (*config.page_stores(), *config.page_rabbitmq(), *config.deliver_conn_ids())
    wanted = {name: list(destinations) for name in names}
    if not conn_ids:
        for conn_id, queue in config.page_sqs():
            wanted.setdefault(conn_id, []).append(queue)
    return wanted


@dataclass(slots=True)
class Examination:
    """The findings of one connection.

    :param destinations: of a store's messages that wait or have failed, by the connection that delivers them.
    :param dispatchers: of a store, the one seen last first; None: the connection is no store, or could not be read.
    """

    findings: list[Finding]
    destinations: Mapping[str, Sequence[str]] = field(default_factory=dict)
    dispatchers: Sequence[DispatcherSeen] | None = None


def examine(wanted: Mapping[str, Sequence[str]], seconds: float) -> dict[str, Examination]:
    """Return what is found of each connection; without an answer in time, the finding ``silent``.

    The destinations of what waits in a store, or has failed, are verified too, over the connections that deliver it.

    :param seconds: for all connections; and as long again for those that stores deliver through.
    """
    alone = len(wanted) == 1
    found = _side_by_side(lambda conn_id: _examine(conn_id, wanted[conn_id], alone), wanted, seconds)
    stores: dict[str, dict[str, str]] = {}
    for store, examination in found.items():
        for conn_id, names in examination.destinations.items():
            for name in names:
                stores.setdefault(conn_id, {}).setdefault(name, store)
    reached = {
        conn_id: of_store
        for conn_id, of_store in stores.items()
        if conn_id not in found or not any(each.code in NO_ANSWER for each in found[conn_id].findings)
    }
    of_messages = _side_by_side(lambda conn_id: _verify_destinations(conn_id, reached[conn_id]), reached, seconds)
    for conn_id, examination in of_messages.items():
        if conn_id in found:
            found[conn_id].findings = _merged(found[conn_id].findings, examination.findings)
        else:
            found[conn_id] = examination
    return found


def _merged(first: list[Finding], of_messages: list[Finding]) -> list[Finding]:
    """Return the findings of a connection, each once: of destinations as its second examination has them."""
    known = {(each.where, each.code) for each in first}
    second = [each for each in of_messages if each.destination or (each.where, each.code) not in known]
    again = {(each.where, each.code) for each in second}
    return [each for each in first if (each.where, each.code) not in again] + second


def _side_by_side(
    work: Callable[[str], Examination], conn_ids: Iterable[str], seconds: float
) -> dict[str, Examination]:
    def run(conn_id: str) -> Examination:
        try:
            return work(conn_id)
        except Exception as error:
            return Examination([_failed(conn_id, error)])

    answers = {conn_id: in_thread(partial(run, conn_id), f"doctor-{conn_id}") for conn_id in conn_ids}
    wait(answers.values(), timeout=seconds)
    silent = f"no answer within {seconds:g} s"
    return {
        conn_id: answer.result() if answer.done() else Examination([no_answer(conn_id, silent, away=True, silent=True)])
        for conn_id, answer in answers.items()
    }


def _examine(conn_id: str, destinations: Sequence[str], alone: bool) -> Examination:
    """Verify a connection."""
    with closing(delivery_for(conn_id)) as delivery:
        report = delivery.verify(() if delivery.is_store and not alone else destinations)
        found = with_remedies(conn_id, report)
        if not isinstance(delivery, DelayedStoreHook):
            if isinstance(delivery, DelayStore):
                asked, stated, answered = utcnow(), delivery.now(), utcnow()
                found += clock_difference(conn_id, asked, stated, answered)
            return Examination(found)
        try:
            dispatchers = delivery.dispatchers()
            found = _with_reason(delivery, _with_paused(delivery, dispatchers, found))
            return Examination(found, delivery.destinations(), dispatchers)
        except TopologyError:
            # the report has what its tables lack
            return Examination(found)


def _verify_destinations(conn_id: str, stores: Mapping[str, str]) -> Examination:
    """Verify the destinations of messages that wait in stores."""
    some = list(islice(stores, MAX_DESTINATIONS))
    with closing(delivery_for(conn_id)) as delivery:
        report = delivery.verify(some)
    found = [
        replace(
            each,
            why=f"store {stores[each.destination]!r} has messages for it, which the first try would give up",
        )
        if each.state is State.MISSING and each.destination and each.destination in stores and not each.why
        else each
        for each in report
    ]
    if len(stores) > len(some):
        found.append(
            Finding(
                state=State.UNKNOWN,
                resource=f"destinations of connection {conn_id!r}",
                found=f"stores have messages for {len(stores):,} destinations, of which {len(some):,} were verified",
                code="destination-missing",
                remedy="name others with --destination",
            )
        )
    return Examination(with_remedies(conn_id, found))


def _with_reason(store: DelayedStoreHook, found: Iterable[Finding]) -> list[Finding]:
    return [replace(each, found=f"{each.found}{_reason(store)}") if each.code == "failed" else each for each in found]


def _reason(store: DelayedStoreHook) -> str:
    return frequent_reason((group.reason, group.count) for group in store.failures()[0])


def _with_paused(
    store: DelayedStoreHook, dispatchers: Sequence[DispatcherSeen], findings: Sequence[Finding]
) -> list[Finding]:
    dags = last_dags(dispatchers, lambda _: True)
    if not any(is_paused for _, is_paused in dags.values()):
        return list(findings)
    state = store.condition()
    return with_paused(store.conn_id, findings, dags, state.lateness, state.next_due, state.at, lambda one: one)


def _failed(conn_id: str, error: Exception) -> Finding:
    from airflow.providers.common.compat.sdk import AirflowNotFoundException

    from airflow_delayed.compat import AirflowException

    # the finding names the connection
    text = (str(error) if isinstance(error, AirflowException) else explained(error)).removeprefix(
        f"connection {conn_id!r}: "
    )
    finding = no_answer(conn_id, text, away=isinstance(error, TransportUnavailable))
    return replace(finding, remedy=_DEFINE) if isinstance(error, AirflowNotFoundException) else finding


def _print_dispatchers(conn_id: str, seen: Sequence[DispatcherSeen]) -> None:
    at_work = [one for one in seen if one.at_work]
    for one in at_work or seen[:1]:
        # None stands for the queue tables of the store's own database
        names = some([conn_id if name is None else name for name in one.conn_ids], separator=", ")
        did = f"at work since {one.started_at:%Y-%m-%d %H:%M:%S} UTC"
        if not one.at_work:
            ended = "ended" if one.ended_at else "gave its last sign of life"
            did = f"none is at work; the last one {ended} at {one.ended_at or one.seen_at:%Y-%m-%d %H:%M:%S} UTC"
        by = ", ".join(filter(None, (one.host and f"on {one.host}", one.dag_id and f"DAG {one.dag_id}")))
        print(one_line(f"Dispatchers of store {conn_id}: {did}, for {names}" + (f" ({by})" if by else "")))
    if not seen:
        print(one_line(f"Dispatchers of store {conn_id}: none was at work within a day"))


def _print(found: Iterable[tuple[str, Finding]]) -> None:
    """Print findings; those of one connection with the same cause together, such as all that needs a right."""
    for group in grouped(found, lambda one: (one[1].severity, one[0], one[1].what, one[1].remedy)):
        conn_id, first = group[0]
        codes = dict.fromkeys(str(finding.to_json()["code"]) for _, finding in group)
        print(f"{first.severity}: connection {one_line(conn_id)}: {', '.join(codes)}")
        print(f"    {one_line('; '.join(finding.where for _, finding in group))}: {one_line(first.what)}")
        if first.remedy:
            print(f"    What to do: {one_line(first.remedy)}")
