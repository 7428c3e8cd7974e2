"""Many messages of few kinds, each made only when it is asked for.

A dispatcher sends thousands at a time. To check and make each by itself takes as long as the database takes to claim
it, and to have all of them at a time keeps Python's garbage collector busy for as long again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, overload

from airflow_delayed.errors import InvalidMessage
from airflow_delayed.message import MAX_ID_LENGTH, UTC, DelayedMessage, unchecked
from airflow_delayed.store.rows import to_message

Row = Mapping[str, Any]

#: Ids as messages have them, each with a blank behind it.
_IDS = re.compile(f"(?:[!-~]{{1,{MAX_ID_LENGTH}}} )*")
#: It is worth its while if so many, on average, have the same destination, headers and tag.
_LEAST = 4


class Alike(Sequence[DelayedMessage]):
    """The messages of rows; all that can be wrong with one was looked for before, see :meth:`of`."""

    def __init__(self, rows: Sequence[Row], like: Sequence[DelayedMessage]) -> None:
        self._rows = rows
        #: Of each row a message with the same destination, headers and tag.
        self._like = like

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Alike | None:
        """Return the messages of rows, or None if one of them expires or cannot be sent, or if they are not alike."""
        kinds = [(row["Destination"], row["Headers"], row["Tag"]) for row in rows]
        distinct = dict(zip(kinds, rows, strict=True))
        if len(distinct) * _LEAST > len(rows):
            return None
        times = [row["Time"] for row in rows]
        if {type(time) for time in times} != {datetime} or not all(time.tzinfo is UTC for time in times):
            return None
        if not all(row["ExpiresAt"] is None for row in rows):
            return None
        if not _IDS.fullmatch(" ".join([*(row["Id"] for row in rows), ""])):
            return None
        try:
            known = {kind: to_message(row) for kind, row in distinct.items()}
        except InvalidMessage:
            return None
        return cls(rows, [known[kind] for kind in kinds])

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[DelayedMessage]:
        return iter(self[:])

    @overload
    def __getitem__(self, index: int) -> DelayedMessage: ...

    @overload
    def __getitem__(self, index: slice) -> list[DelayedMessage]: ...

    def __getitem__(self, index: int | slice) -> DelayedMessage | list[DelayedMessage]:
        if isinstance(index, int):
            return to_message(self._rows[index])
        rows, like = self._rows[index], self._like[index]
        return unchecked(
            len(rows),
            destination=[one.destination for one in like],
            body=[bytes(row["State"]) for row in rows],
            due_at=[row["Time"] for row in rows],
            message_id=[row["Id"] for row in rows],
            headers=[one.headers for one in like],
            tag=[one.tag for one in like],
            expires_at=[None] * len(rows),
        )
