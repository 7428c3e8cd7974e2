"""Rows in the text format of COPY, read back by the rules that PostgreSQL's documentation gives."""

from __future__ import annotations

import re
from datetime import datetime, timezone

from hypothesis import given
from hypothesis import strategies as st

from airflow_delayed.store.bulk import lines

WRITTEN = {"t": "\t", "n": "\n", "r": "\r", "\\": "\\"}
TEXTS = st.text(st.sampled_from("a\\\t\n\rN.x,ü☂ "), max_size=9)
ROWS = st.fixed_dictionaries(
    {
        "text": TEXTS,
        "maybe": st.none() | TEXTS,
        "bytes": st.binary(max_size=9),
        "number": st.integers() | st.none(),
        "time": st.datetimes(timezones=st.just(timezone.utc)),
    }
)


def read(field: str) -> str | None:
    if field == "\\N":
        return None
    return re.sub(r"\\(.)", lambda found: WRITTEN[found[1]], field)


@given(st.lists(ROWS, min_size=1, max_size=5))
def test_lines(rows):
    text = lines(rows, ["text", "maybe", "bytes", "number", "time"])
    assert text.endswith("\n")
    found = [[read(field) for field in line.split("\t")] for line in text[:-1].split("\n")]
    assert found == [
        [
            row["text"],
            row["maybe"],
            "\\x" + row["bytes"].hex(),
            None if row["number"] is None else str(row["number"]),
            row["time"].isoformat(),
        ]
        for row in rows
    ]


def test_a_text_of_another_kind():
    class Name(str):
        """As numpy's texts are."""

    moment = datetime(2030, 1, 1, tzinfo=timezone.utc)
    rows = [{"a": Name("x\ty"), "b": moment}, {"a": Name("z"), "b": moment}]
    assert lines(rows, ["a", "b"]) == "x\\ty\t2030-01-01T00:00:00+00:00\nz\t2030-01-01T00:00:00+00:00\n"
