"""What ``airflow delayed ...`` does."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from airflow.utils.cli import suppress_logs_and_warning

from airflow_delayed.cli.output import show
from airflow_delayed.errors import DelayedError
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.hooks.store_operations import REASONS, system_user
from airflow_delayed.message import parse_moment
from airflow_delayed.store.outcomes import Outcome, Outcomes

#: How many ids of each outcome are named after a change by filter.
NAMED = 5
#: What a table shows of a change, and of a message.
AUDIT_COLUMNS = ("at", "who", "action", "selection", "counts")
COLUMNS = ("message_id", "destination", "due_at", "state", "tag", "retry_count", "last_error")


@suppress_logs_and_warning
def list_(args: Namespace) -> None:
    """``airflow delayed list``."""
    with _store(args) as store:
        found = list(
            store.list(**_filter(args), ids=args.message_id or None, limit=args.limit or None, after=args.after)
        )
        show([asdict(one) for one in found], args.output, COLUMNS)
        if args.limit and len(found) == args.limit:
            print(f"There may be more: --after {found[-1].token}", file=sys.stderr)


@suppress_logs_and_warning
def get_(args: Namespace) -> None:
    """``airflow delayed get``."""
    with _store(args) as store:
        known = store.get(args.message_id)
        if known is None:
            raise SystemExit(f"The store {args.conn_id} knows no message {args.message_id}.")
        show([asdict(known)], args.output)


@suppress_logs_and_warning
def counts_(args: Namespace) -> None:
    """``airflow delayed counts``."""
    with _store(args) as store:
        found = store.counts(
            tag=args.tag,
            destination=args.destination,
            deliver_conn_id=args.deliver_conn_id,
            overdue=timedelta(seconds=args.overdue),
            hours=args.hours,
            by_destination=args.by_destination,
        )
    if args.output in ("json", "yaml"):
        show([asdict(found)], args.output)
        return
    dues = {"next_due": found.next_due, "oldest_due": found.oldest_due}
    rows = [{"what": name, "messages": value} for name, value in {**found.numbers(), **dues}.items()]
    rows += [{"what": f"due from {hour}", "messages": many} for hour, many in found.by_hour.items() if many]
    rows += [{"what": f"to {name}", "messages": many} for name, many in found.by_destination.items()]
    show(rows, args.output)


@suppress_logs_and_warning
def cancel_(args: Namespace) -> None:
    """``airflow delayed cancel``."""
    with _store(args) as store:
        _change(args, lambda **options: store.cancel(args.message_id or None, **_filter(args), **options))


@suppress_logs_and_warning
def reschedule_(args: Namespace) -> None:
    """``airflow delayed reschedule``."""
    with _store(args) as store:
        due_at = None if args.due_at is None else parse_moment("--due-at", args.due_at)

        def work(**options: Any) -> Outcomes:
            return store.reschedule(args.message_id or None, due_at, delay=args.delay, **_filter(args), **options)

        _change(args, work)


@suppress_logs_and_warning
def retry_(args: Namespace) -> None:
    """``airflow delayed retry``."""
    with _store(args) as store:
        _change(args, lambda **options: store.retry(args.message_id or None, **_filter(args), **options))


@suppress_logs_and_warning
def purge_(args: Namespace) -> None:
    """``airflow delayed purge``."""
    age = timedelta(days=args.older_than)
    with _store(args) as store:
        _change(args, lambda **options: store.purge(age, reason=args.reason or REASONS, **options))


@suppress_logs_and_warning
def erase_(args: Namespace) -> None:
    """``airflow delayed erase``."""
    with _store(args) as store:
        _change(args, lambda **options: store.erase(args.message_id or None, **_filter(args), **options))


@suppress_logs_and_warning
def audit_(args: Namespace) -> None:
    """``airflow delayed audit``."""
    since = None if args.since is None else parse_moment("--since", args.since)
    with _store(args) as store:
        found = list(store.audit(message_id=args.message_id, since=since, limit=args.limit or None, after=args.after))
        show([asdict(one) for one in found], args.output, AUDIT_COLUMNS)
        if args.limit and len(found) == args.limit:
            print(f"There may be more: --after {found[-1].token}", file=sys.stderr)


@suppress_logs_and_warning
def dispatchers_(args: Namespace) -> None:
    """``airflow delayed dispatchers``."""
    with _store(args) as store:
        show([asdict(one) for one in store.dispatchers()], args.output)


@contextmanager
def _store(args: Namespace) -> Iterator[DelayedStoreHook]:
    """Give the store, and turn what goes wrong into a line of text."""
    from airflow_delayed.compat import AirflowException

    # as Airflow's own commands: connections are those of its database too
    os.environ.setdefault("_AIRFLOW_PROCESS_CONTEXT", "server")
    try:
        with closing(DelayedStoreHook(args.conn_id, table=args.table, schema=args.schema)) as store:
            yield store
    except (DelayedError, ValueError, AirflowException) as error:
        raise SystemExit(str(error)) from None


def _filter(args: Namespace) -> dict[str, Any]:
    given = {name: getattr(args, name) for name in ("tag", "destination", "deliver_conn_id")}
    for name in ("due_from", "due_until"):
        text = getattr(args, name)
        given[name] = None if text is None else parse_moment(f"--{name.replace('_', '-')}", text)
    if hasattr(args, "state"):
        given["state"] = args.state
    return given


def _change(args: Namespace, work: Callable[..., Outcomes]) -> None:
    """Do it, after a question if it is by filter, and show what became of the messages."""
    by_ids = bool(getattr(args, "message_id", None))
    actor = system_user()
    if args.dry_run:
        found = work(dry_run=True)
    elif by_ids or args.yes:
        found = work(actor=actor)
    else:
        would = work(dry_run=True)
        if not would.changed:
            print("No message would be changed.", file=sys.stderr)
        elif not _agreed(would):
            raise SystemExit("Nothing was changed.")
        found = work(actor=actor) if would.changed else would
    show(_by_id(found) if by_ids else _by_outcome(found), args.output)


def _agreed(would: Outcomes) -> bool:
    what = ", ".join(f"{many:,} {outcome.value}" for outcome, many in would.counts.items())
    # not by input(), which writes the question where the output goes
    print(f"This would be: {what}. Go on? (y/N) ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _by_id(found: Outcomes) -> list[dict[str, Any]]:
    return [{"message_id": name, "outcome": outcome.value} for name, outcome in found.items()]


def _by_outcome(found: Outcomes) -> list[dict[str, Any]]:
    named: dict[Outcome, list[str]] = {outcome: [] for outcome in found.counts}
    for name, outcome in found.items():
        if len(named[outcome]) < NAMED:
            named[outcome].append(name)
    return [
        {"outcome": outcome.value, "messages": many, "such_as": named[outcome]}
        for outcome, many in found.counts.items()
    ]
