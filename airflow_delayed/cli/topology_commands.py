"""The commands ``install``, ``uninstall`` and ``redrive``.

``install`` does as TopologyInstallOperator, or prints the SQL of a store, for a database administrator. The others
delete RabbitMQ's delay levels, or send its unroutable messages again, after a question.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from contextlib import closing
from shlex import quote
from typing import TYPE_CHECKING

from airflow.utils.cli import suppress_logs_and_warning

from airflow_delayed.cli.commands import confirmed, expected_errors, show
from airflow_delayed.delivery import TopologyReport, delivery_for
from airflow_delayed.errors import DelayedError, NotAStore
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.store.api import install_script

if TYPE_CHECKING:
    from airflow_delayed.rabbitmq.redrive import RedriveReport


@suppress_logs_and_warning
def install_(args: Namespace) -> None:
    """``airflow delayed install``: print what is there and what was made; exit code 1 if something differs."""
    with expected_errors():
        if args.sql:
            print(_script(args), end="")
            return
        if args.dialect:
            raise DelayedError("--dialect is for --sql alone")
        report = _install(args)
    _show_report(report, args.output)


def _show_report(report: TopologyReport, output: str) -> None:
    rows = [{"where": finding.where, "what": str(finding).removeprefix(f"{finding.where}: ")} for finding in report]
    show(rows, output)
    if not report.ok:
        raise SystemExit(1)


def _install(args: Namespace) -> TopologyReport:
    if not args.conn_id:
        raise DelayedError("--conn-id is missing: name the connection of the store or the broker")
    with closing(delivery_for(args.conn_id, table=args.table, schema=args.schema)) as delivery:
        return delivery.install(args.queue or [], create_destinations=True, dry_run=args.dry_run)


def _script(args: Namespace) -> str:
    names = {"table": args.table} if args.table else {}
    return install_script(args.dialect or _dialect(args.conn_id), args.queue or [], schema=args.schema, **names)


def _dialect(conn_id: str | None) -> str:
    """Return SQLAlchemy's name of a connection's database, by the connection's type alone."""
    if not conn_id:
        raise DelayedError("--sql needs the connection of the store, or --dialect")
    try:
        name = DelayedStoreHook(conn_id).database()
    except NotAStore:
        raise DelayedError(
            f"connection {conn_id!r} is a broker's, which has no SQL. This shows what an install makes there: airflow"
            f" delayed install --conn-id {quote(conn_id)} --queue ... --dry-run. A user who may make it runs the same"
            " without --dry-run"
        ) from None
    if name == "mysql":
        raise DelayedError(
            f"connection {conn_id!r} is of type mysql, which serves MySQL and MariaDB, and their SQL differs: add"
            " --dialect mysql or --dialect mariadb"
        )
    return name


@suppress_logs_and_warning
def uninstall_(args: Namespace) -> None:
    """``airflow delayed uninstall``: print what was deleted, or would be; exit code 1 while messages wait."""
    with expected_errors(), closing(_rabbitmq(args.conn_id, "has delay levels", _OTHERS_UNINSTALL)) as hook:
        report = hook.uninstall(dry_run=True)
        if not args.dry_run and report.findings:
            # messages that wait are an error, and no question
            if report.ok and not args.yes and not confirmed(f"{len(report.findings):,} parts deleted"):
                raise SystemExit("Nothing was changed.")
            report = hook.uninstall()
    _show_report(report, args.output)


def _rabbitmq(conn_id: str, what: str, others: str) -> RabbitMQDelayHook:
    """Return the hook of a connection of RabbitMQ."""
    hook = delivery_for(conn_id)
    if not isinstance(hook, RabbitMQDelayHook):
        raise DelayedError(f"connection {conn_id!r} is not RabbitMQ's, which alone {what}. {others}")
    return hook


_OTHERS_UNINSTALL = "A store is its tables: drop them. SQS has queues: aws sqs delete-queue"
_OTHERS_REDRIVE = "For failed messages of a store: airflow delayed retry. For dead letters of SQS: SqsDelayHook.redrive"


@suppress_logs_and_warning
def redrive_(args: Namespace) -> None:
    """``airflow delayed redrive``: print by destination what was sent, or would be, and what stays with the reason."""
    with expected_errors():
        report = _redrive(args)
    outcome = "would be sent" if report.dry_run else "sent"
    sent = _sendable(report) if report.dry_run else report.by_destination
    rows = [{"outcome": f"{outcome} to {name}", "messages": many} for name, many in sent.items()]
    rows += [{"outcome": f"stays: {reason}", "messages": many} for reason, many in _staying(report).items()]
    show(rows, args.output, ("outcome", "messages"))


def _redrive(args: Namespace) -> RedriveReport:
    hook = _rabbitmq(args.conn_id, "has unroutable messages", _OTHERS_REDRIVE)
    would = hook.redrive(destinations=args.destination, dry_run=True)
    many = sum(_sendable(would).values())
    if args.dry_run or not many:
        return would
    staying = sum(_staying(would).values())
    if not args.yes and not confirmed(f"{many:,} sent" + (f", {staying:,} stay" if staying else "")):
        raise SystemExit("Nothing was changed.")
    print(f"{many:,} messages are sent again", file=sys.stderr)
    return hook.redrive(destinations=args.destination)


def _sendable(would: RedriveReport) -> dict[str, int]:
    return {name: many for name, many in would.destinations.items() if name not in would.problems}


def _staying(report: RedriveReport) -> dict[str, int]:
    """Return how many messages stay, by reason; of a dry run, those whose destination has a problem too."""
    found = dict(report.remaining)
    for name, reason in report.problems.items():
        found[reason] = found.get(reason, 0) + report.destinations[name]
    return found
