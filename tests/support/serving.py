"""``airflow delayed dispatcher`` as a process, to be sent signals; see support.forked."""

from __future__ import annotations

import logging
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event

from airflow.cli import cli_parser

from airflow_delayed import metrics
from airflow_delayed.cli import commands, service  # noqa: F401 - the parser imports them when a command is called
from airflow_delayed.delivery import SendReport
from airflow_delayed.errors import TransportUnavailable
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.message import DelayedMessage, utcnow
from airflow_delayed.store.dispatch import dispatcher
from airflow_delayed.store.policy import DispatchPolicy
from support.dispatching import Journal


class Arrivals(Journal):
    """Writes by how many seconds each message is late; a broker that is away while a file is there."""

    away: Path | None = None

    def send(self, messages) -> SendReport:
        if self.away is not None and self.away.exists():
            raise TransportUnavailable("connection 'broker': connection refused")
        return super().send(messages)

    def word(self, message: DelayedMessage) -> str:
        # the dispatcher's clock may have been set back a little since it let the message pass, for it carries on the
        # database's; in a test that is this machine's
        return str((utcnow() - message.due_at).total_seconds())


def serve(
    pipe: Connection,
    *,
    arguments: list[str],
    journal: str,
    log: str,
    hangs_after: int | None = None,
    grace: float | None = None,
    reachable: float | None = None,
    stalled: float | None = None,
    away: dict[str, str] | None = None,
) -> None:
    """Run the command; what it is asked for often, it is asked for more often here.

    :param hangs_after: the broker hangs when it has taken so many messages.
    :param grace, reachable, stalled: seconds in place of the service's own.
    :param away: by connection, the file whose broker is away while the file is there.
    """

    def transport(conn_id: str, clock) -> Journal:
        made = Arrivals(journal, clock, hangs_after=hangs_after)
        made.away = Path(away[conn_id]) if away and conn_id in away else None
        return made

    service.delivery_for = transport
    service.ASK_EVERY = 0.1
    metrics.GAUGES_EVERY = 0.1
    if grace is not None:
        service.GRACE = grace
    if reachable is not None:
        service.REACHABLE = reachable
    if stalled is not None:
        dispatcher.STALLED = stalled
    logging.getLogger("airflow_delayed").addHandler(logging.FileHandler(log))
    args = cli_parser.get_parser().parse_args(["delayed", "dispatcher", *arguments])
    args.func(args)


def dispatch_for_ever(pipe: Connection, *, conn_id: str, deliver_conn_id: str) -> None:
    """Dispatch through one connection as the command does, until the process is killed."""
    hook = partial(DelayedStoreHook, conn_id, deliver_conn_id)
    service.ConnectionLoop(deliver_conn_id, DispatchPolicy(), hook, None, lambda: None).start()
    pipe.send("ready")
    Event().wait()
