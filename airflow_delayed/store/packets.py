"""How much goes into one statement: MySQL and MariaDB refuse longer ones, and PostgreSQL a parameter of 1 GB."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, text

from airflow_delayed.errors import LimitExceeded

#: What is escaped in a literal, and so takes two bytes.
_ESCAPED = b"\0\n\r\\'\"\x1a"
#: Bytes for the statement itself, and for the columns that are short.
_REST = 16_384
#: The longest statement that is made of several rows, in bytes.
_LONGEST = 4_194_304


def pieces(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Cut rows into pieces that fit into a statement each.

    :raises LimitExceeded: one row alone does not fit.
    """
    limit = int(connection.execute(text("SELECT @@max_allowed_packet")).scalar_one())
    longest = min(limit, _LONGEST)
    piece: list[Mapping[str, Any]] = []
    size = _REST
    for row in rows:
        length = sum(_literal(value) for value in row.values() if isinstance(value, bytes)) + _REST
        if length > limit:
            raise LimitExceeded(
                "body",
                f"of message {row['Id']} makes, with its headers, a statement of {length:,} bytes, and the database"
                f" takes {limit:,}; raise its max_allowed_packet, or keep the content elsewhere and send where it is",
            )
        if piece and size + length > longest:
            yield piece
            piece, size = [], _REST
        piece.append(row)
        size += length
    if piece:
        yield piece


#: Bytes of content in the arrays of one statement for PostgreSQL, where each byte takes two characters.
ARRAYS = 67_108_864


def portions_by_size(rows: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Cut rows into portions of some 64 MB of content."""
    portion: list[Mapping[str, Any]] = []
    size = 0
    for row in rows:
        length = sum(len(value) for value in row.values() if isinstance(value, bytes))
        if portion and size + length > ARRAYS:
            yield portion
            portion, size = [], 0
        portion.append(row)
        size += length
    if portion:
        yield portion


def _literal(content: bytes) -> int:
    return 2 * len(content) - len(content.translate(None, _ESCAPED))
