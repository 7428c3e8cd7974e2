"""The commands of ``airflow delayed ...``, and how they print rows."""

from __future__ import annotations

import logging
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from datetime import datetime, timedelta
from enum import Enum
from functools import partial
from typing import Any

from airflow.utils.cli import suppress_logs_and_warning

from airflow_delayed import config
from airflow_delayed.delivery import delivery_for
from airflow_delayed.errors import DelayedError, InputError, one_line
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.identity import SentBy
from airflow_delayed.message import parse_moment
from airflow_delayed.store.api import Outcome, Outcomes, PauseReport, UnpauseReport, system_user
from airflow_delayed.store.policy import DispatchPolicy, breaker_times
from airflow_delayed.store.schema import LEFT

#: Messages of a page.
_PAGE = 1_000
#: More than a store remembers.
_ALL = 2**31 - 2
#: Ids of each outcome that a change by filter names.
EXAMPLES = 5
#: The columns of a table of pauses, and of a table of messages.
PAUSE_COLUMNS = ("selection", "at", "who", "because")
LEFT_COLUMNS = ("message_id", "destination", "deliver_conn_id", "due_at", "state", "at", "tag")
#: What was dispatched and cannot be taken back, in a table of outcomes.
NOT_DUE = "dispatched, not due yet"
NOT_DUE_COLUMNS = ("outcome", "messages", "until", "deliver_conn_id", "examples")
MESSAGE_COLUMNS = (*LEFT_COLUMNS[:5], "tag", "retry_count", "last_error")


@suppress_logs_and_warning
def list_(args: Namespace) -> None:
    """``airflow delayed list``."""
    with store_of(args) as store:
        selection = selection_of(args)
        if "ids" in selection:
            selection["ids"] = [name for text in selection["ids"] for name in _ids(store, text)]
        if set(args.state or ()) & set(LEFT):
            page = store.page(**selection, limit=args.limit or _ALL, after=args.after)
            show([asdict(one) for one in page.remembered], args.output, LEFT_COLUMNS)
            if page.next:
                print(f"There may be more: --after {page.next}", file=sys.stderr)
            return
        found = list(store.list(**selection, limit=args.limit or None, after=args.after))
        rows = [asdict(one) for one in found]
        if args.output not in ("json", "yaml"):
            # as the filter names it; in JSON a queue table has no connection
            rows = [{**row, "deliver_conn_id": row["deliver_conn_id"] or args.store_conn_id} for row in rows]
        show(rows, args.output, MESSAGE_COLUMNS)
        if args.limit and len(found) == args.limit:
            print(f"There may be more: --after {found[-1].token}", file=sys.stderr)


@suppress_logs_and_warning
def get_(args: Namespace) -> None:
    """``airflow delayed get``."""
    with store_of(args) as store:
        found = [known for name in _ids(store, args.message_id) if (known := store.get(name)) is not None]
        if not found:
            raise SystemExit(f"The store {args.store_conn_id} has no message {args.message_id}.")
        show([asdict(known) for known in found], args.output)


def _ids(store: DelayedStoreHook, text: str) -> list[str]:
    """Return an argument as it is, and the ids in the store whose key it is."""
    return [text, *store.ids_of(text)]


@suppress_logs_and_warning
def counts_(args: Namespace) -> None:
    """``airflow delayed counts``."""
    with store_of(args) as store:
        found = store.counts(
            **_texts(args),
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
    with store_of(args) as store:
        run_change(args, lambda **options: store.cancel(**selection_of(args), **options))


@suppress_logs_and_warning
def restore_(args: Namespace) -> None:
    """``airflow delayed restore``."""
    with store_of(args) as store:
        more = {"overdue_ok": args.overdue_ok, **selection_of(args)}
        run_change(args, lambda **options: store.restore(**more, **options))


@suppress_logs_and_warning
def reschedule_(args: Namespace) -> None:
    """``airflow delayed reschedule``."""
    with store_of(args) as store:
        due_at = None if args.due_at is None else parse_moment("--due-at", args.due_at)
        more = {"due_at": due_at, "delay": args.delay, **selection_of(args)}
        run_change(args, lambda **options: store.reschedule(**more, **options))


@suppress_logs_and_warning
def retry_(args: Namespace) -> None:
    """``airflow delayed retry``."""
    with store_of(args) as store:
        run_change(args, lambda **options: store.retry(**selection_of(args), **options))


@suppress_logs_and_warning
def erase_(args: Namespace) -> None:
    """``airflow delayed erase``."""
    with store_of(args) as store:
        chosen = selection_of(args)

        def erase(**options: Any) -> Outcomes:
            # a tag alone reaches what is remembered too, by its ids
            gone = _gone(store, chosen["tag"]) if chosen.keys() == {"tag"} else []
            found = store.erase(**chosen, **options)
            if rest := [message_id for message_id in gone if message_id not in found]:
                found.add(store.erase(rest, **options))
            return found

        run_change(args, erase)


def _gone(store: DelayedStoreHook, tag: str) -> list[str]:
    """Return the ids of messages with a tag that have left the store and are remembered."""
    found: list[str] = []
    after = None
    while True:
        page = store.page(tag=tag, state=LEFT, limit=_PAGE, after=after)
        found += (one.message_id for one in page.remembered)
        if (after := page.next) is None:
            return found


@suppress_logs_and_warning
def pause_(args: Namespace) -> None:
    """``airflow delayed pause``."""
    with store_of(args) as store:
        selection = _texts(args, ("destination", "deliver_conn_id"))
        if not selection and not args.end:
            show([one.summary(store.conn_id) for one in store.pauses()], args.output, PAUSE_COLUMNS)
            return
        work: Callable[..., PauseReport | UnpauseReport] = partial(
            store.unpause if args.end else store.pause, **selection
        )
        if args.dry_run or not args.yes:
            report = work(dry_run=True)
            if not args.dry_run and report.pause is not None and not confirmed(str(report).removeprefix("would ")):
                raise SystemExit("Nothing was changed.")
        if not args.dry_run:
            report = work(actor=actor_of(args), because=args.because)
        if report.pause is None:
            raise SystemExit(f"Nothing was changed: {report}.")
        print(report, file=sys.stderr)
        show([report.summary(store.conn_id)], args.output)


def dispatcher_(args: Namespace) -> None:
    """``airflow delayed dispatcher``: it logs, as the other processes of Airflow that stay do."""
    from airflow_delayed.cli.service import DispatchService

    with store_of(args) as store:
        names, policy = _dispatch_arguments(args)
        if args.dry_run:
            show(_plan(store, names, policy), args.output)
            return
        service = DispatchService(
            lambda: DelayedStoreHook(args.store_conn_id, table=args.table, schema=args.schema), names, policy
        )
        try:
            ended = service.run(args.host, args.port)
        except OSError as error:
            raise SystemExit(
                f"/live and /ready cannot be served at {args.host}:{args.port}: {error}; choose another"
                " --port, or --port 0 for any free one"
            ) from None
    if not ended:
        # a thread that is still sending would keep the interpreter from ending
        logging.shutdown()
        sys.stdout.flush()
        os._exit(1)


def _dispatch_arguments(args: Namespace) -> tuple[list[str], DispatchPolicy]:
    names = list(args.deliver_conn_ids or config.deliver_conn_ids())
    if not names:
        raise ValueError(
            "--deliver-conn-ids is not given, and option deliver_conn_ids in section [delayed] of Airflow's"
            " configuration is empty; name the connections that messages may be delivered through"
        )
    spans = {"auto_lookahead": config.lookahead(), "remember": config.remember()}
    if args.give_up_after is not None:
        spans |= breaker_times(timedelta(seconds=args.give_up_after))
    given = {name: value for name, value in vars(args).items() if value is not None}
    policy = DispatchPolicy.restored({**{name: span.total_seconds() for name, span in spans.items()}, **given})
    return names, policy


def _plan(store: DelayedStoreHook, names: Sequence[str], policy: DispatchPolicy) -> list[dict[str, Any]]:
    """Return a row for each connection: how far ahead it is dispatched to, and what is due."""
    with closing(store.dispatcher(names, delivery_for, **asdict(policy))) as dispatcher:
        windows = dispatcher.windows()
        dispatcher.check()
    rows = []
    for name, window in windows.items():
        counts = store.counts(deliver_conn_id=name, hours=0)
        seconds = window.total_seconds()
        rows.append({"connection": name, "lookahead": seconds, "due": counts.due, "waiting": counts.waiting})
    return rows


@contextmanager
def store_of(args: Namespace) -> Iterator[DelayedStoreHook]:
    """Yield the store's hook; an error ends the command with a line of text."""
    with (
        expected_errors(),
        closing(DelayedStoreHook(args.store_conn_id, table=args.table, schema=args.schema)) as store,
    ):
        yield store


@contextmanager
def expected_errors() -> Iterator[None]:
    """End the command with a line of text at an error that says what to do."""
    from airflow_delayed.compat import AirflowException

    # as Airflow's own commands: connections are those of its database too
    os.environ.setdefault("_AIRFLOW_PROCESS_CONTEXT", "server")
    try:
        yield
    except (DelayedError, ValueError, AirflowException) as error:
        raise SystemExit(str(error)) from None


def selection_of(args: Namespace) -> dict[str, Any]:
    """Return the ids and the criteria of the filter, without those whose option is absent.

    :raises InputError: an option or an id is empty, as a variable of the shell may be that was never set.
    """
    selection = _texts(args)
    if sender := _texts(args, ("dag_id", "run_id")):
        if "dag_id" not in sender:
            raise InputError("--run-id needs --dag-id: a run's id is of its DAG alone")
        selection["sent_by"] = SentBy(**sender)
    for name in ("due_from", "due_until"):
        if (text := getattr(args, name)) is not None:
            selection[name] = parse_moment(_option(name), text)
    if getattr(args, "state", None) is not None:
        selection["state"] = args.state
    if args.message_id:
        if not all(args.message_id):
            raise InputError("an id of a message is empty, so nothing is changed: is a variable of the shell not set?")
        selection["ids"] = args.message_id
    return selection


def _texts(args: Namespace, names: Sequence[str] = ("tag", "destination", "deliver_conn_id")) -> dict[str, Any]:
    texts: dict[str, Any] = {}
    for name in names:
        text = getattr(args, name)
        if text is not None and not text.strip():
            raise InputError(
                f"{_option(name)} is empty, so nothing is changed: is a variable of the shell not set? To select"
                f" whatever the {name} is, leave {_option(name)} out"
            )
        if text is not None:
            texts[name] = text
    return texts


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def run_change(args: Namespace, work: Callable[..., Outcomes]) -> None:
    """Run a change, after a question if it is by filter, and print what became of the messages."""
    by_ids = bool(getattr(args, "message_id", None))
    by = {"actor": actor_of(args), "because": args.because}
    if args.dry_run:
        found = work(dry_run=True)
    elif by_ids or args.yes:
        found = work(**by)
    else:
        would = work(dry_run=True)
        # an erase also changes what is remembered of messages that were dispatched
        changes = would.total if args.subcommand == "erase" else would.changed
        if not changes:
            print("No message would be changed.", file=sys.stderr)
        elif not confirmed(would.in_words):
            raise SystemExit("Nothing was changed.")
        found = work(**by) if changes else would
    ahead = found.out_of_reach.rows()
    if by_ids:
        show([{"message_id": name, "outcome": outcome.value} for name, outcome in found.items()], args.output)
    elif not ahead:
        show(by_outcome(found), args.output)
    else:
        # on standard output too, for who reads no other
        rows = by_outcome(found) + [{"outcome": NOT_DUE, "examples": [], **row} for row in ahead]
        show([{"until": None, "deliver_conn_id": None, **row} for row in rows], args.output, NOT_DUE_COLUMNS)
    for text in filter(None, (str(found.out_of_reach), found.beyond)):
        print(text, file=sys.stderr)


def actor_of(args: Namespace) -> str:
    """Return the system's user, and whom the command line names; anybody can name anybody there."""
    return f"{system_user()}, for {args.actor}" if args.actor else system_user()


def confirmed(what: str) -> bool:
    """Ask on the terminal whether to go on, and return the answer; without a terminal it is no."""
    # not by input(), which writes the question where the output goes
    print(f"This would be: {what}. Go on? (y/N) ", end="", file=sys.stderr, flush=True)
    agreed = sys.stdin.readline().strip().lower() in ("y", "yes")
    if not agreed and not sys.stdin.isatty():
        print("No: there is no terminal to answer on; pass --yes. ", end="", file=sys.stderr)
    return agreed


def by_outcome(found: Outcomes) -> list[dict[str, Any]]:
    """Return a row for each outcome: how many messages, and the first ids."""
    named: dict[Outcome, list[str]] = {outcome: [] for outcome in found.counts}
    for name, outcome in found.items():
        if len(named[outcome]) < EXAMPLES:
            named[outcome].append(name)
    return [
        {"outcome": outcome.value, "messages": many, "examples": named[outcome]}
        for outcome, many in found.counts.items()
    ]


def show(rows: Sequence[Mapping[str, Any]], output: str, columns: Sequence[str] | None = None) -> None:
    """Print rows as a table, as JSON, as YAML or plain.

    JSON and YAML have numbers as numbers, times in ISO 8601 and null for None.

    :param columns: the columns of a table; JSON and YAML have all of them.
    """
    from airflow.cli.simple_table import AirflowConsole
    from rich.markup import escape

    console, values = AirflowConsole(), plain(rows)
    if output == "json":
        console.print_as_json(values)
    elif output == "yaml":
        console.print_as_yaml(values)
    else:
        # rich reads markup in a table
        shown = escape if output == "table" else str
        console.print_as(
            [{shown(_cell(name)): shown(_cell(row[name])) for name in columns or row} for row in values], output
        )


def plain(value: Any) -> Any:
    """Return a value made of types that JSON and YAML have."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {str(plain(name)): plain(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    return value


def _cell(value: Any) -> str:
    """Return a value as text that controls no terminal and begins no line."""
    if isinstance(value, list):
        return ", ".join(_cell(item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{_cell(name)}: {_cell(item)}" for name, item in value.items())
    return "" if value is None else one_line(str(value))
