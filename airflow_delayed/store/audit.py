"""Who changed what, and when: one row of the table ``_audit`` for each call. It holds ids and tags, never content."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, insert, update

from airflow_delayed.store.outcomes import Outcome
from airflow_delayed.store.schema import Tables

#: How many ids are named; the rest is counted.
NAMED = 5
MAX_WHO = 250


class AuditEntry:
    """One call: written with the first messages that it changes, and updated with all further ones.

    So whenever it ends, the audit never says less than what was done.

    :param who: cut to 250 characters.
    :param selection: what was asked for, as plain values.
    """

    def __init__(self, who: str, action: str, selection: Mapping[str, Any]) -> None:
        self._who = who[:MAX_WHO]
        self._action = action
        self._selection = json.dumps(dict(selection), ensure_ascii=False)
        self._seq: int | None = None

    def write(self, connection: Connection, tables: Tables, counts: Mapping[Outcome, int], at: datetime) -> int:
        """Write what was done so far, within the caller's transaction, and return the row's number.

        It is to be given to :meth:`written` when that transaction has been committed.
        """
        audit = tables.audit
        text = json.dumps({outcome.value: counts[outcome] for outcome in sorted(counts)})
        if self._seq is not None:
            connection.execute(update(audit).where(audit.c.Seq == self._seq).values(Counts=text))
            return self._seq
        row = {"At": at, "Who": self._who, "Action": self._action, "Selection": self._selection, "Counts": text}
        key = connection.execute(insert(audit).values(row)).inserted_primary_key
        assert key is not None
        return int(key[0])

    def written(self, seq: int) -> None:
        """Note that the row is there."""
        self._seq = seq


def of_ids(ids: list[str]) -> dict[str, Any]:
    """Return how a selection by ids is told."""
    return {"ids": len(ids), "first": ids[:NAMED]}
