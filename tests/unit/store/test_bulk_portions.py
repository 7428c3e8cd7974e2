"""Rows are cut so that MySQL and MariaDB take each statement."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.dialects import mysql

from airflow_delayed.errors import LimitExceeded
from airflow_delayed.store import bulk


class Server:
    """Says how much it takes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def execute(self, statement):
        assert "max_allowed_packet" in str(statement.compile(dialect=mysql.dialect()))
        return SimpleNamespace(scalar_one=lambda: self.limit)


def written(row) -> int:
    return sum(2 if byte in b"\0\n\r\\'\"\x1a" else 1 for part in (row["State"], row["Headers"]) for byte in part)


#: What a body repeats, how often, and its headers: a body written out would be too long to show.
ROWS = st.lists(
    st.tuples(st.sampled_from([b"", b"a", b"\0", b"'a"]), st.integers(0, 25_000), st.binary(max_size=9)), max_size=30
)


@given(ROWS, st.integers(100_000, 200_000))
def test_each_piece_fits_and_none_is_lost(given_rows, limit):
    rows = [{"Id": "a", "State": content * count, "Headers": headers} for content, count, headers in given_rows]
    pieces = list(bulk.packet_portions(Server(limit), rows))
    assert [row for piece in pieces for row in piece] == rows
    for piece in pieces:
        assert piece
        assert sum(map(written, piece)) <= limit - 16_384
    # no more pieces than that: a piece and the next one's first row would not have gone together
    for piece, after in pairwise(pieces):
        assert sum(map(written, [*piece, after[0]])) + 16_384 * (len(piece) + 2) > limit


def test_what_does_not_fit_alone_says_what_to_do():
    rows = [{"Id": "m1", "State": b"\0" * 60_000, "Headers": b"{}"}]
    with pytest.raises(LimitExceeded, match=r"body: of message m1 .* 136,386 bytes.* 136,385; raise its max_allowed"):
        list(bulk.packet_portions(Server(136_385), rows))
    assert list(bulk.packet_portions(Server(136_386), rows)) == [rows]
