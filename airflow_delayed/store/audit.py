"""The audit: one row of the table ``_audit`` for each change of messages; ids and tags, never content."""

from __future__ import annotations

import getpass
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, func, insert, select, update

from airflow_delayed.errors import WrongToken
from airflow_delayed.store.dialects import dialect_of
from airflow_delayed.store.outcomes import Outcome
from airflow_delayed.store.schema import Tables

#: A change by ids names the first so many.
AUDITED_IDS = 5
_MAX_WHO = 250
MAX_BECAUSE = 1000
#: Rows a page.
AUDIT_PAGE = 1000
#: The most characters of a selection, or of its counts, that are read; this package writes fewer.
_MOST_CHARACTERS = 16_384
#: The key of the reason, beside the selection.
_BECAUSE = "because"


class AuditEntry:
    """The row of one call: inserted by the transaction of its first change, and updated by that of each further one.

    :param who: cut to 250 characters.
    :param because: the user's reason; cut to 1000 characters.
    :param hide_tag: write the hash of the selection's tag in place of the tag, in earlier rows too, and remove that tag
        from remembered ids.
    """

    def __init__(
        self,
        who: str,
        action: str,
        selection: Mapping[str, Any],
        *,
        because: str | None = None,
        hide_tag: bool = False,
    ) -> None:
        self._who = who[:_MAX_WHO]
        self._action = action
        self._hidden = selection.get("tag") if hide_tag else None
        hash_ = {} if self._hidden is None else {"tag": hash_of(self._hidden)}
        reason = {_BECAUSE: because[:MAX_BECAUSE]} if because else {}
        self._selection = json.dumps({**selection, **hash_, **reason}, ensure_ascii=False)
        #: The row's number, once it is committed.
        self.seq: int | None = None
        #: What earlier calls of the same change have counted.
        self._before = Counter[str]()

    def go_on(self, connection: Connection, tables: Tables, seq: int) -> None:
        """Add the counts to the row of an earlier call of the same change, in place of a row of their own."""
        audit = tables.audit
        same = audit.c.Seq == seq, audit.c.Who == self._who, audit.c.Action == self._action
        row = connection.execute(select(audit.c.Selection, audit.c.Counts).where(*same)).one_or_none()
        if row is None or row.Selection != self._selection:
            raise WrongToken(
                f"audit_seq={seq}: the audit has no such row of the same user, action and filter; give that of the"
                " first call"
            )
        self.seq, self._before = seq, Counter(_counts(row.Counts))

    def write(self, connection: Connection, tables: Tables, counts: Mapping[Outcome, int], at: datetime) -> int:
        """Write the counts so far, within the caller's transaction, and return the row's number for :meth:`written`."""
        audit = tables.audit
        sums = self._before + Counter({outcome.value: count for outcome, count in counts.items()})
        text = json.dumps(dict(sorted(sums.items())))
        if self.seq is not None:
            connection.execute(update(audit).where(audit.c.Seq == self.seq).values(Counts=text))
            return self.seq
        if self._hidden is not None:
            _hide(connection, tables, self._hidden)
        row = {"At": at, "Who": self._who, "Action": self._action, "Selection": self._selection, "Counts": text}
        key = connection.execute(insert(audit).values(row)).inserted_primary_key
        assert key is not None
        return int(key[0])

    def written(self, seq: int) -> None:
        """Note that the row is committed."""
        self.seq = seq


def hash_of(tag: str) -> str:
    """Return what the audit has in place of an erased tag: whoever knows the tag can find it, nobody can read it."""
    return f"sha256:{hashlib.sha256(tag.encode()).hexdigest()}"


def _hide(connection: Connection, tables: Tables, tag: str) -> None:
    # in JSON the quotes within a text are escaped, so this finds the criterion alone
    text, hidden = (json.dumps({"tag": name}, ensure_ascii=False)[1:-1] for name in (tag, hash_of(tag)))
    column = tables.audit.c.Selection
    with_tag = update(tables.audit).where(column.contains(text, autoescape=True))
    connection.execute(with_tag.values(Selection=func.replace(column, text, hidden)))
    past = tables.past
    connection.execute(update(past).where(past.c.Tag == tag).values(Tag=None))


def system_user() -> str:
    """Return the name of the operating system's user."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # a container's user need not have a name
        return f"uid {os.getuid()}"


def of_ids(ids: list[str]) -> dict[str, Any]:
    """Return the selection of a change by ids."""
    return {"ids": len(ids), "first": ids[:AUDITED_IDS]}


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    """One recorded call; it may have changed no message."""

    seq: int
    #: When it began, by the database's clock.
    at: datetime
    who: str | None
    #: "cancel", "restore", "reschedule", "retry", "erase" or "purge".
    action: str
    #: By ids: ``ids`` is how many, and ``first`` the first five. By filter: its criteria. ``to``: the new due time.
    selection: Mapping[str, Any]
    #: How many messages by outcome.
    counts: Mapping[str, int]
    #: The user's reason.
    because: str | None

    @property
    def token(self) -> str:
        """The place of this record: ``audit(after=token)`` continues behind it."""
        return str(self.seq)


def records(
    engine: Engine,
    tables: Tables,
    *,
    message_id: str | None = None,
    since: datetime | None = None,
    limit: int | None = None,
    after: str | None = None,
) -> Iterator[AuditRecord]:
    """Yield the records, the newest first, in pages by key; no transaction is open between two pages."""
    if limit is not None and limit < 0:
        raise ValueError(f"limit={limit} is negative")
    table, place, left = tables.audit, None if after is None else _place(after), limit
    columns = _read_columns(engine, tables)
    conditions = [] if since is None else [table.c.At >= since]
    if message_id is not None:
        # the id as JSON writes it; the check below leaves out texts that only contain it
        conditions.append(table.c.Selection.contains(json.dumps(message_id, ensure_ascii=False), autoescape=True))
    while left is None or left > 0:
        size = AUDIT_PAGE if left is None else min(AUDIT_PAGE, left)
        statement = select(*columns).where(*conditions).order_by(table.c.Seq.desc()).limit(size)
        if place is not None:
            statement = statement.where(table.c.Seq < place)
        with engine.connect().execution_options(read_only=True) as connection:
            page = [_record_of(dict(row._mapping)) for row in connection.execute(statement)]
        found = [one for one in page if message_id is None or message_id in one.selection.get("first", ())]
        yield from found
        if len(page) < size:
            return
        place = page[-1].seq
        left = None if left is None else left - len(found)


def _read_columns(engine: Engine, tables: Tables) -> list[ColumnElement[Any]]:
    audit = tables.audit
    long = [dialect_of(engine).beginning(column, _MOST_CHARACTERS) for column in (audit.c.Selection, audit.c.Counts)]
    return [audit.c.Seq, audit.c.At, audit.c.Who, audit.c.Action, long[0].label("Selection"), long[1].label("Counts")]


def _record_of(row: Mapping[str, Any]) -> AuditRecord:
    selection = dict(_object(row["Selection"]))
    because = selection.pop(_BECAUSE, None)
    return AuditRecord(
        seq=int(row["Seq"]),
        at=row["At"],
        who=row["Who"],
        action=row["Action"],
        selection=selection,
        counts=_counts(row["Counts"]),
        because=because if isinstance(because, str) else None,
    )


def _counts(text: str) -> dict[str, int]:
    return {name: many for name, many in _object(text).items() if isinstance(many, int)}


def _object(text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _place(token: str) -> int:
    if not (token.isascii() and token.isdecimal() and len(token) < 19):
        raise ValueError("after= is no token of a listed record; give the .token of the last one")
    return int(token)
