"""``airflow delayed erase``: a person's messages in each place within reach, and what remains elsewhere."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from airflow.utils.cli import suppress_logs_and_warning

from airflow_delayed import config
from airflow_delayed.cli.commands import actor_of, by_outcome, confirmed, run_change, selection_of, show, store_of
from airflow_delayed.errors import InputError
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.intake.sources import RejectedRows
from airflow_delayed.intake.spool import KEPT
from airflow_delayed.store.api import Outcome, Outcomes
from airflow_delayed.store.records import Remembered

PLACE_COLUMNS = ("where", "outcome", "messages", "until", "what")
#: Messages of a page.
_PAGE = 1_000


@suppress_logs_and_warning
def erase_(args: Namespace) -> None:
    """``airflow delayed erase``: by a tag alone in every place, by any other selection in the store."""
    with store_of(args) as store:
        chosen = selection_of(args)
        if "tag" not in chosen or chosen.keys() - {"tag", "ids"}:
            if args.rejects:
                raise InputError("--rejects goes with --tag, and no other filter")
            run_change(args, lambda **options: store.erase(**chosen, **options))
            return
        person = Person(store, chosen["tag"], chosen.get("ids", ()), args.rejects or ())
        rows = person.erase(dry_run=True)
        if not args.dry_run:
            if any(row["messages"] != 0 for row in rows) and not args.yes and not confirmed(_in_words(rows)):
                raise SystemExit("Nothing was changed.")
            rows = person.erase(dry_run=False, actor=actor_of(args), because=args.because)
        show([*rows, *person.remaining()], args.output, PLACE_COLUMNS)


class Person:
    """The messages of a tag, wherever they are.

    :param ids: of messages that have left the store so long ago that it knows their tag no longer.
    :param rejects: files of rejected rows.
    :raises InputError: a file of rejects cannot be read.
    """

    def __init__(self, store: DelayedStoreHook, tag: str, ids: Sequence[str], rejects: Sequence[str]) -> None:
        self._store = store
        self._tag = tag
        self._left = list(_left(store, tag))
        waiting = {one.message_id: one.origin for one in store.list(tag=tag)}
        self._runs = {*waiting.values(), *(one.origin for one in self._left)} - {None}
        left = (one.message_id for one in self._left)
        #: Each once, in this order: what has left the store, for the tag reaches it no longer, comes first.
        self._ids = list(dict.fromkeys([*ids, *left, *waiting]))
        # all of them are read before anything is erased
        self._rejects = [RejectedRows(path, [tag, *self._ids]) for path in rejects]

    def erase(self, *, dry_run: bool, **by: str | None) -> list[dict[str, Any]]:
        """Erase, or count what would be, and return a row for each place."""
        rows = [_row("store", each.pop("outcome"), **each) for each in by_outcome(self._in_store(dry_run, by))]
        for name, found in self._store.erase_delivered(self._ids, dry_run=dry_run).items():
            if isinstance(found, str):
                rows.append(_row(f"queue table {name}", "remains", None, what=f"{found}; erase it as its owner"))
            elif found:
                rows.append(_row(f"queue table {name}", Outcome.ERASED.value, found))
        for file in self._rejects:
            if not dry_run and file.count:
                file.remove()
            rows.append(_row(f"rejects file {file.path}", Outcome.ERASED.value, file.count))
        return rows

    def _in_store(self, dry_run: bool, by: Mapping[str, Any]) -> Outcomes:
        options = {"dry_run": True} if dry_run else by
        found = self._store.erase(tag=self._tag, **options)
        # a message that waited when the ids were read may have been dispatched since then
        rest = [name for name in self._ids if name not in found]
        if rest:
            found.add(self._store.erase(rest, **options))
        return found

    def remaining(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each place that this does not reach: what it has, and until when."""
        now = self._store.now()

        def remains(
            where: str, what: str, messages: int | None = None, until: datetime | None = None
        ) -> dict[str, Any]:
            return _row(where, "remains", messages, until=until, what=what)

        yield {
            **remains(
                "store: remembered ids",
                "the ids and when they were erased, so that a late retry sends nothing; after a restore of a backup"
                " erase them again",
                len(self._ids),
                now + config.remember(),
            ),
            "ids": self._ids,
        }
        yield remains(
            "store: audit",
            "who erased, when, how many, up to five ids, and the tag's SHA-256; until you delete its rows",
        )
        sent: dict[str, list[Remembered]] = {}
        for one in self._left:
            if one.state == Outcome.DISPATCHED.value and one.deliver_conn_id is not None:
                sent.setdefault(one.deliver_conn_id, []).append(one)
        for conn_id, messages in sorted(sent.items()):
            names = ", ".join(sorted({one.destination for one in messages if one.destination}))
            yield remains(
                f"broker of connection {conn_id}",
                f"dispatched: inside of the broker until due, then in {names} until a consumer takes it or its"
                " retention ends, also as a dead letter; let the consumer drop these ids",
                len(messages),
                max((one.due_at for one in messages if one.due_at), default=None),
            )
        yield remains("consumers", "what they have received, error destinations and dead-letter queues too")
        yield {
            **remains(
                "Airflow",
                "XComs, rendered fields and task logs of the runs that sent, asset events, the event log; until you"
                " delete the runs and their logs, or airflow db clean does",
                len(self._runs) or None,
            ),
            "runs": sorted(" / ".join(filter(None, map(str, run.parts))) for run in self._runs if run),
        }
        yield remains("spools of workers", "rows of queries and functions whose tasks were killed", until=now + KEPT)
        if not self._rejects:
            yield remains("rejects files", "none was named by --rejects; until you delete them")
        yield remains(
            "backups, replicas' logs, free space of the database's files",
            "until their own retention, or a VACUUM; after a restore erase the ids again",
        )


def _left(store: DelayedStoreHook, tag: str) -> Iterator[Remembered]:
    """Yield what has left the store and is remembered with this tag."""
    after = None
    while True:
        page = store.page(tag=tag, state=["dispatched", "cancelled"], limit=_PAGE, after=after)
        yield from page.remembered
        after = page.next
        if after is None:
            return


def _row(
    where: str,
    outcome: str,
    messages: int | None,
    examples: Sequence[str] = (),
    until: datetime | None = None,
    what: str = "",
) -> dict[str, Any]:
    row = {"where": where, "outcome": outcome, "messages": messages, "until": until, "what": what}
    return {**row, "examples": list(examples)} if examples else row


def _in_words(rows: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(
        f"{row['where']}: {row['messages'] or ''} {row['outcome']}" for row in rows if row["messages"] != 0
    )
