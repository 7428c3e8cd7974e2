from __future__ import annotations

from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delayed.clock import Shift, resolve, zone
from airflow_delayed.errors import InputError
from airflow_delayed.message import UTC

BERLIN = zone("Europe/Berlin")


@pytest.mark.parametrize(
    ("local", "moment", "shift"),
    [
        ((2026, 1, 15, 12, 0), (2026, 1, 15, 11, 0), Shift.NONE),
        ((2026, 7, 15, 12, 0), (2026, 7, 15, 10, 0), Shift.NONE),
        # 02:30 does not exist: it moves later, to 03:30 summer time
        ((2026, 3, 29, 2, 30), (2026, 3, 29, 1, 30), Shift.GAP),
        # 02:30 happens twice: the first is summer time
        ((2026, 10, 25, 2, 30), (2026, 10, 25, 0, 30), Shift.FOLD),
        ((2026, 10, 25, 3, 0), (2026, 10, 25, 2, 0), Shift.NONE),
    ],
)
def test_local_time_means(local, moment, shift):
    assert resolve("due_at", datetime(*local), BERLIN) == (datetime(*moment, tzinfo=UTC), shift)


@given(st.datetimes(min_value=datetime(1980, 1, 1), max_value=datetime(2037, 1, 1)), st.sampled_from([0, 1]))
def test_resolved_time_shows_the_local_time_again_unless_a_gap_took_it(local, fold):
    moment, shift = resolve("due_at", local.replace(fold=fold), BERLIN)
    shown = moment.astimezone(BERLIN).replace(tzinfo=None, fold=0)
    if shift is Shift.GAP:
        assert shown > local
    else:
        assert shown == local


@pytest.mark.parametrize("name", ["Mars/Olympus", "", "../etc/passwd"])
def test_unknown_zone_is_refused(name):
    with pytest.raises(InputError, match="IANA"):
        zone(name)
