"""How far a dispatcher has come: what it claimed itself it must not take for free, nor pass over what it has not."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from hypothesis import given
from hypothesis import strategies as st

from airflow_delayed.store.dispatch.claim import MOST_PASSED, ClaimCursor

NOON = datetime(2030, 1, 1, 12, tzinfo=timezone.utc)
DUES = st.lists(st.integers(0, 5), max_size=12)


def row(second: int, name: object) -> dict:
    return {"Id": str(name), "Time": NOON + timedelta(seconds=second)}


@given(dues=DUES, later=DUES, limit=st.integers(1, 4))
def test_all_from_a_place_on_but_what_it_names_was_never_claimed(dues, later, limit):
    """As a dispatcher goes on: oldest first, beginning anew once, when others have stored more."""
    waiting = [row(second, number) for number, second in enumerate(dues)]
    claimed: list[dict] = []
    cursor = ClaimCursor()
    for turn in range(30):
        if turn == 3:
            waiting += [row(second, f"later {number}") for number, second in enumerate(later)]
            since = None
        else:
            since = cursor.since
        if cursor.untouched and since is not None:
            free = [one for one in waiting if one["Time"] >= since and one["Id"] not in cursor.passed]
            assert not [one for one in free if one in claimed]
        free = [one for one in waiting if one not in claimed and (since is None or one["Time"] >= since)]
        rows = sorted(free, key=lambda one: one["Time"])[:limit]
        claimed += rows
        cursor = cursor.advance(rows, limit)
        assert (cursor.since is None) == (len(rows) < limit)
    assert sorted(one["Id"] for one in claimed) == sorted(one["Id"] for one in waiting)


def test_many_of_one_moment_are_not_named():
    cursor = ClaimCursor()
    cursor = cursor.advance([row(0, number) for number in range(MOST_PASSED)], MOST_PASSED)
    assert cursor.untouched
    cursor = cursor.advance([row(0, "one more")], 1)
    assert len(cursor.passed) == MOST_PASSED + 1
    assert not cursor.untouched
