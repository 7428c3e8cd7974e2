"""How far a dispatcher has come: what it claimed itself it must not take for free, nor pass over what it has not."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from hypothesis import given
from hypothesis import strategies as st

from airflow_delayed.store.dispatch.claim import ClaimCursor

NOON = datetime(2030, 1, 1, 12, tzinfo=timezone.utc)
DUES = st.lists(st.integers(0, 5), max_size=12)


def row(second: int, name: object, place: int) -> dict:
    return {"Id": str(name), "Time": NOON + timedelta(seconds=second), "ctid": f"({place // 3},{place % 3 + 9})"}


def place(row: dict) -> tuple[int, ...]:
    return tuple(map(int, row["ctid"].strip("()").split(",")))


@given(dues=DUES, later=DUES, limit=st.integers(1, 4))
def test_all_from_a_place_on_but_what_it_names_was_never_claimed(dues, later, limit):
    """As a dispatcher goes on: oldest first, beginning anew once, when others have stored more."""
    waiting = [row(second, number, number) for number, second in enumerate(dues)]
    claimed: list[dict] = []
    cursor = ClaimCursor()
    for turn in range(30):
        if turn == 3:
            # a place that is free again may be anywhere
            waiting += [row(second, f"later {number}", -1 - number) for number, second in enumerate(later)]
            since = None
        else:
            since = cursor.since
        there = waiting
        if since is not None:
            passed = place({"ctid": cursor.passed})
            there = [one for one in waiting if (one["Time"], place(one)) > (since, passed)]
            if cursor.untouched:
                assert not [one for one in there if one in claimed]
        free = [one for one in there if one not in claimed]
        rows = sorted(free, key=lambda one: (one["Time"], place(one)))[:limit]
        claimed += rows
        cursor = cursor.advance(rows, limit)
        assert (cursor.since is None) == (len(rows) < limit)
    assert sorted(one["Id"] for one in claimed) == sorted(one["Id"] for one in waiting)


def test_where_rows_have_no_place_there_is_none_to_pass():
    rows = [{"Id": "a", "Time": NOON}]
    assert ClaimCursor().advance(rows, 1) == ClaimCursor(since=NOON, furthest=NOON, untouched=True)
