"""A small store of one's own: messages in a SQLite file, leased by the time of a clock that it is given."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import datetime

from airflow_delayed.message import DelayedMessage, from_microseconds, microseconds, utcnow
from airflow_delayed.store.protocol import LEASE, LeasedMessage, UnsupportedConsistency


class FileStore:
    def __init__(self, path: str, clock: Callable[[], datetime] = utcnow) -> None:
        self.path = path
        self.clock = clock

    def initialize(self, name: str, consistency: str) -> None:
        if consistency != "at_least_once":
            raise UnsupportedConsistency(f"a file cannot keep {consistency!r}; ask for 'at_least_once'")

    def set_up_infrastructure(self) -> None:
        self._run(
            "CREATE TABLE IF NOT EXISTS messages"
            " (id TEXT PRIMARY KEY, due INTEGER, leased INTEGER, failures INTEGER, content TEXT, body BLOB)"
        )

    def store(self, message: DelayedMessage) -> None:
        content = {
            "destination": message.destination,
            "headers": dict(message.headers),
            "tag": message.tag,
            "expires": None if message.expires_at is None else microseconds(message.expires_at),
        }
        row = message.message_id, microseconds(message.due_at), json.dumps(content), message.body
        self._run("INSERT OR IGNORE INTO messages VALUES (?, ?, 0, 0, ?, ?)", *row)

    def fetch_batch(self, at: datetime, limit: int) -> Sequence[LeasedMessage]:
        now = self.clock()
        rows = self._run(
            "UPDATE messages SET leased = ? WHERE id IN"
            " (SELECT id FROM messages WHERE due <= ? AND leased <= ? ORDER BY due LIMIT ?) RETURNING *",
            *(microseconds(now + LEASE), microseconds(at), microseconds(now), limit),
        )
        return [_leased(*row) for row in sorted(rows, key=lambda row: row[1])]

    def fetch_next_due(self, at: datetime) -> LeasedMessage | None:
        return next(iter(self.fetch_batch(at, 1)), None)

    def next_due(self) -> datetime | None:
        ((due,),) = self._run("SELECT min(due) FROM messages")
        return None if due is None else from_microseconds(due)

    def remove(self, leased: LeasedMessage) -> bool:
        return bool(self._run("DELETE FROM messages WHERE id = ? RETURNING id", leased.message.message_id))

    def increment_failure_count(self, leased: LeasedMessage) -> bool:
        name = leased.message.message_id
        return bool(
            self._run("UPDATE messages SET failures = failures + 1, leased = 0 WHERE id = ? RETURNING id", name)
        )

    def _run(self, statement: str, *values: object) -> list[tuple]:
        with closing(sqlite3.connect(self.path, timeout=60)) as connection, connection:
            return connection.execute(statement, values).fetchall()


def _leased(name: str, due: int, _: int, failures: int, content: str, body: bytes) -> LeasedMessage:
    fields = json.loads(content)
    expires = fields["expires"]
    message = DelayedMessage(
        destination=fields["destination"],
        body=body,
        due_at=from_microseconds(due),
        message_id=name,
        headers=fields["headers"],
        tag=fields["tag"],
        expires_at=None if expires is None else from_microseconds(expires),
    )
    return LeasedMessage(message=message, failures=failures)


def at_environment() -> FileStore:
    """What a task makes its store by."""
    return FileStore(os.environ["OWN_STORE"])
