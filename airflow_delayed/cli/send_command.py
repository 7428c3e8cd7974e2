"""``airflow delayed send``: one message, by hand; with ``--wait`` to a queue of its own, until it has arrived there."""

from __future__ import annotations

import signal
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from shlex import quote
from typing import Any, cast
from uuid import uuid4

from airflow.utils.cli import suppress_logs_and_warning

from airflow_delayed.cli.commands import expected_errors, show
from airflow_delayed.delivery import Delivery, State, TemporaryQueue, TopologyReport, delivery_for
from airflow_delayed.errors import DelayedError, DestinationMissing, InputError, TopologyError
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.message import DelayedMessage, delay_of, due_after, parse_moment, utcnow
from airflow_delayed.store.api import Outcome

#: What the name of a temporary queue begins with.
PREFIX = "airflow-delayed-try-"
#: Seconds between two looks at what becomes of a message in a store.
_LOOK = 1.0
#: The outcomes of a cancel after which the message may still arrive.
_TOO_LATE = (Outcome.DISPATCHED, Outcome.IN_FLIGHT)


@suppress_logs_and_warning
def send_(args: Namespace) -> None:
    """``airflow delayed send``: print what was sent, and with ``--wait`` how late it was; exit code 1 if it failed."""
    try:
        with expected_errors(), _ended_by_signals():
            row = _send(args)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    show([row], args.output)


def _send(args: Namespace) -> dict[str, Any]:
    if args.wait == (args.destination is not None):
        raise InputError("name --destination, or with --wait none: it makes a queue of its own")
    if args.wait and args.dry_run:
        raise InputError("--wait sends a message; leave --dry-run out")
    if args.timeout < 0:
        raise InputError(f"--timeout {args.timeout:g} is negative")
    with ExitStack() as stack:
        trial = _Trial(*_connections(args, stack), args.conn_id, args.store_conn_id)
        now = trial.now()
        message = _message(args, now)
        trial.check(message, now, args.destination)
        if args.dry_run:
            return trial.row(message, f"would be {trial.state}")
        if not args.wait:
            duplicate = trial.send(message)
            return trial.row(message, f"{trial.state} before" if duplicate else trial.state)
        return _wait(trial, message, now, args.timeout)


def _connections(args: Namespace, stack: ExitStack) -> tuple[Delivery, DelayedStoreHook | None]:
    """Return the transport, and the store in which the message waits, if there is one.

    :raises InputError: the two do not go together.
    """
    own_store = args.store_conn_id is None or args.store_conn_id == args.conn_id
    options = {"table": args.table, "schema": args.schema}
    delivery = delivery_for(args.conn_id, **(options if own_store else {}))
    stack.enter_context(closing(delivery))
    if own_store:
        return delivery, cast(DelayedStoreHook, delivery) if delivery.is_store else None
    if delivery.is_store:
        raise InputError(
            f"--conn-id {args.conn_id} is the connection that delivers, and stores its messages itself: leave"
            f" --store-conn-id out; or name the broker with --conn-id"
        )
    named = {name: value for name, value in options.items() if value is not None}
    return delivery, stack.enter_context(closing(DelayedStoreHook(args.store_conn_id, args.conn_id, **named)))


def _message(args: Namespace, now: datetime) -> DelayedMessage:
    if args.due_at is not None and args.delay is not None:
        raise InputError("name --due-at or --delay, and not both")
    due = due_after(now, delay_of(args.delay or 0.0, "--delay"))
    return DelayedMessage(
        destination=args.destination or f"{PREFIX}{uuid4().hex[:12]}",
        body=args.value.encode(),
        due_at=due if args.due_at is None else parse_moment("--due-at", args.due_at),
        message_id=args.message_id or f"try-{uuid4().hex}",
        headers=dict(_header(text) for text in args.header or ()),
        tag=args.tag,
    )


def _header(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise InputError(f"--header {text!r} is no header: write NAME=VALUE")
    return name, value


@dataclass(frozen=True, slots=True)
class _Trial:
    """The chain that a message goes through."""

    delivery: Delivery
    store: DelayedStoreHook | None
    conn_id: str
    store_conn_id: str | None

    @property
    def state(self) -> str:
        return "sent" if self.store is None else "stored"

    def now(self) -> datetime:
        """Return the present, by the clock that the due time goes by."""
        return utcnow() if self.store is None else self.store.now()

    def check(self, message: DelayedMessage, now: datetime, destination: str | None) -> None:
        """Check the message, the transport with the destination if it has to be there, and the store.

        :raises DelayedError: something lacks that a message needs; nothing was sent.
        """
        delay = max(message.due_at - now, timedelta(0))
        if destination is None and self.store is None and delay > self.delivery.horizon:
            raise InputError(
                f"--wait: through {self.conn_id} a message is delayed by {self.delivery.horizon} at most in a queue of"
                " its own; shorten the delay, or let it wait in a store (--store-conn-id)"
            )
        if self.store is not None:
            self.store.check(message, now)
        if self.delivery is not self.store:
            longest = delay if self.store is None else min(delay, self.delivery.horizon)
            self.delivery.check(message, message.due_at - longest)
            names = [] if destination is None else [destination]
            _require(self.conn_id, self.delivery.verify(names, max_delay=longest))
        if self.store is not None:
            names = [destination] if destination and self.delivery is self.store else []
            _require(self.store_conn_id or self.conn_id, self.store.verify(names))
            if self.store.last_seen() is None:
                _remark(
                    f"no dispatcher was at work within a day for connection {self.conn_id}, and one has to deliver the"
                    f" message: airflow delayed dispatcher --store-conn-id {self.store_conn_id or self.conn_id}"
                    f" --deliver-conn-ids {self.conn_id}"
                )

    def send(self, message: DelayedMessage) -> bool:
        """Send or store the message, and return whether the store had it already."""
        return bool((self.store or self.delivery).send([message]).duplicates)

    def row(self, message: DelayedMessage, state: str) -> dict[str, Any]:
        """Return what the command prints."""
        return {
            "message_id": message.message_id,
            "destination": message.destination,
            "conn_id": self.conn_id,
            "store_conn_id": self.store_conn_id,
            "due_at": message.due_at,
            "state": state,
        }


def _require(conn_id: str, report: TopologyReport) -> None:
    """Remark what a user should know, and check that all is there.

    :raises DestinationMissing: the destination is not.
    :raises TopologyError: something else is not.
    """
    for finding in report:
        if finding.state in (State.WARNING, State.BLOCKED):
            _remark(str(finding))
    if report.missing_destinations:
        remedy = f"airflow delayed install --conn-id {quote(conn_id)} --queue {quote(report.missing_destinations[0])}"
        raise DestinationMissing(conn_id, report.missing_destinations, f"make it: {remedy}. Nothing was sent")
    if report.unready:
        raise TopologyError(conn_id, report)


def _wait(trial: _Trial, message: DelayedMessage, now: datetime, timeout: float) -> dict[str, Any]:
    seconds = max((message.due_at - now).total_seconds(), 0.0) + timeout
    queue: TemporaryQueue | None = None
    try:
        with trial.delivery.temporary_queue(message.destination, seconds) as queue:
            arrived_at = _arrival(trial, queue, message, seconds)
    finally:
        if queue is not None and queue.remains:
            _remark(queue.remains)
    late = (arrived_at - message.due_at).total_seconds()
    return {**trial.row(message, "arrived"), "arrived_at": arrived_at, "late_seconds": round(late, 3)}


def _arrival(trial: _Trial, queue: TemporaryQueue, message: DelayedMessage, seconds: float) -> datetime:
    """Send the message, and return when it has arrived.

    :raises DelayedError: it was given up, or has not arrived in time.
    """
    deadline, arrived = time.monotonic() + seconds, False
    # a send that fails for the connection's sake may have sent it
    queue.awaited = trial.store is None
    try:
        try:
            trial.send(message)
        except (InputError, TopologyError):
            queue.awaited = False
            raise
        _remark(f"{trial.state} {message.message_id} to {message.destination}, due {message.due_at.isoformat()}")
        while (left := deadline - time.monotonic()) > 0:
            if arrived := queue.arrives(min(left, _LOOK)):
                return trial.now()
            if trial.store is not None:
                _check_stored(trial.store, message)
        raise DelayedError(f"it has not arrived {_where(trial, message)}{_advice(trial)}")
    finally:
        if arrived:
            queue.awaited = False
        elif trial.store is not None:
            queue.awaited = not _withdrawn(trial.store, message)


def _check_stored(store: DelayedStoreHook, message: DelayedMessage) -> None:
    """Check that the message still waits, or was dispatched.

    :raises DelayedError: neither.
    """
    outcomes = store.progress(ids=[message.message_id]).outcomes
    state = next((name for name, number in outcomes.items() if number), "not in the store")
    if state in ("waiting", "dispatched"):
        return
    known = store.get(message.message_id)
    reason = getattr(known, "last_error", None)
    raise DelayedError(f"it does not arrive: it is {state.replace('_', '-')}{f': {reason}' if reason else ''}")


def _where(trial: _Trial, message: DelayedMessage) -> str:
    store = trial.store
    if store is None:
        return "in time, though it was sent and confirmed"
    if store.progress(ids=[message.message_id]).waiting:
        seen = store.last_seen()
        when = "none was at work within a day" if seen is None else f"the last one was at work at {seen.isoformat()}"
        return f"in time, because no dispatcher has taken it from the store; {when}"
    return "in time, though a dispatcher has dispatched it"


def _advice(trial: _Trial) -> str:
    names = dict.fromkeys(name for name in (trial.store_conn_id, trial.conn_id) if name)
    return f". Examine the chain: airflow delayed doctor {' '.join(f'--conn-id {quote(name)}' for name in names)}"


def _withdrawn(store: DelayedStoreHook, message: DelayedMessage) -> bool:
    """Cancel the message, and return whether it cannot arrive any more."""
    try:
        outcomes = store.cancel([message.message_id], because="airflow delayed send --wait has ended")
    except DelayedError as error:
        _remark(f"message {message.message_id} may still be in the store: {error}")
        return False
    return outcomes[message.message_id] not in _TOO_LATE


def _remark(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, so that a temporary queue is removed."""

    def end(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
