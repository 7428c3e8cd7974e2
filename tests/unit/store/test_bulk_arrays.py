"""Array literals, read back by the grammar that PostgreSQL's documentation gives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from airflow_delayed.store.bulk import array


def read(literal: str) -> list[str | None]:
    """In quotes a backslash takes what follows as it is; NULL without quotes is none."""
    assert literal[0] == "{"
    assert literal[-1] == "}"
    rest, found = literal[1:-1], []
    position = 0
    while position < len(rest):
        if rest[position] == '"':
            element, position = "", position + 1
            while rest[position] != '"':
                position += rest[position] == "\\"
                element += rest[position]
                position += 1
            position += 1
        else:
            end = rest.find(",", position)
            element = rest[position : end if end >= 0 else len(rest)]
            position += len(element)
            element = None if element == "NULL" else element
        found.append(element)
        assert position == len(rest) or rest[position] == ","
        position += 1
    return found


@given(st.lists(st.none() | st.text(st.sampled_from('ab"\\{},NUL\n ü'), max_size=9)))
def test_texts(values):
    assert read(array(values)) == values


@given(st.lists(st.binary(max_size=9)), st.lists(st.integers()), st.lists(st.datetimes()))
def test_bytes_numbers_and_times(contents, numbers, times):
    assert [bytes.fromhex(one.removeprefix("\\x")) for one in read(array(contents))] == contents
    assert [int(one) for one in read(array(numbers))] == numbers
    assert read(array(times)) == [moment.isoformat() for moment in times]
