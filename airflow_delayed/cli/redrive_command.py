"""``airflow delayed redrive``: send RabbitMQ's unroutable messages again, after a question."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from typing import TYPE_CHECKING

from airflow.utils.cli import suppress_logs_and_warning

from airflow_delayed.cli.commands import confirmed, show
from airflow_delayed.delivery import delivery_for
from airflow_delayed.errors import DelayedError
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook

if TYPE_CHECKING:
    from airflow_delayed.rabbitmq.drain import MoveReport


@suppress_logs_and_warning
def redrive_(args: Namespace) -> None:
    """``airflow delayed redrive``: print by destination what was sent, or would be, and what stays with the reason."""
    from airflow_delayed.compat import AirflowException

    # as Airflow's own commands: connections are those of its database too
    os.environ.setdefault("_AIRFLOW_PROCESS_CONTEXT", "server")
    try:
        report = _redrive(args)
    except (DelayedError, ValueError, AirflowException) as error:
        raise SystemExit(str(error)) from None
    outcome = "would be sent" if report.dry_run else "sent"
    sent = _sendable(report) if report.dry_run else report.by_destination
    rows = [{"outcome": f"{outcome} to {name}", "messages": many} for name, many in sent.items()]
    rows += [{"outcome": f"stays: {reason}", "messages": many} for reason, many in _staying(report).items()]
    show(rows, args.output, ("outcome", "messages"))


def _redrive(args: Namespace) -> MoveReport:
    hook = delivery_for(args.conn_id)
    if not isinstance(hook, RabbitMQDelayHook):
        raise DelayedError(
            f"connection {args.conn_id!r} is not RabbitMQ's, which alone has unroutable messages. For failed"
            " messages of a store: airflow delayed retry. For dead letters of SQS: SqsDelayHook.redrive"
        )
    would = hook.redrive(destinations=args.destination, dry_run=True)
    many = sum(_sendable(would).values())
    if args.dry_run or not many:
        return would
    staying = sum(_staying(would).values())
    if not args.yes and not confirmed(f"{many:,} sent" + (f", {staying:,} stay" if staying else "")):
        raise SystemExit("Nothing was changed.")
    print(f"{many:,} messages are sent again", file=sys.stderr)
    return hook.redrive(destinations=args.destination)


def _sendable(would: MoveReport) -> dict[str, int]:
    return {name: many for name, many in would.destinations.items() if name not in would.problems}


def _staying(report: MoveReport) -> dict[str, int]:
    """Return how many messages stay, by reason; of a dry run, those whose destination has a problem too."""
    found = dict(report.remaining)
    for name, reason in report.problems.items():
        found[reason] = found.get(reason, 0) + report.destinations[name]
    return found
