"""Messages made from rows together are those that each row makes by itself, and what is odd is found before."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delayed.message import DelayedMessage
from airflow_delayed.store.dispatch import attempt
from airflow_delayed.store.dispatch.attempt import LazyMessages
from airflow_delayed.store.records import to_message, to_row

UTC = timezone.utc
NOW = datetime(2030, 1, 1, tzinfo=UTC)


def rows(count: int, **changed: object) -> list[dict]:
    """As they are claimed; the last is changed."""
    made = [
        to_row(
            DelayedMessage(
                destination="ä b" if number % 2 else "orders",
                body=b"%d" % number,
                due_at=NOW + timedelta(seconds=number),
                message_id=f"m{number}",
                headers={"kind": "reminder"} if number % 3 else {},
                tag="customer" if number % 2 else None,
            ),
            "broker",
        )
        for number in range(count)
    ]
    return [*made[:-1], {**made[-1], **changed}] if made else []


@given(count=st.integers(24, 60), start=st.integers(-70, 70), stop=st.none() | st.integers(-70, 70))
def test_they_are_the_messages_of_their_rows(count, start, stop):
    claimed = rows(count)
    wanted = [to_message(row) for row in claimed]
    lazy = LazyMessages.of(claimed)
    assert lazy is not None
    assert list(lazy) == wanted
    assert lazy[start:stop] == wanted[start:stop]
    assert (len(lazy), lazy[count // 2], lazy[-1]) == (count, wanted[count // 2], wanted[-1])
    with pytest.raises(IndexError):
        lazy[count]


@pytest.mark.parametrize(
    "changed, failed, expired",
    [
        ({"Id": "has a blank"}, 1, 0),
        ({"Id": ""}, 1, 0),
        ({"Id": "x" * 129}, 1, 0),
        ({"Destination": ""}, 1, 0),
        ({"Tag": ""}, 1, 0),
        ({"Headers": b"[]"}, 1, 0),
        ({"Headers": b'{"a": 1}'}, 1, 0),
        ({"ExpiresAt": NOW}, 0, 1),
        ({"ExpiresAt": NOW + timedelta(days=1)}, 0, 0),
        # of a connection whose times are not in UTC
        ({"Time": NOW.astimezone(timezone(timedelta(hours=1)))}, 0, 0),
    ],
)
def test_one_that_is_odd_holds_up_no_other(changed, failed, expired):
    claimed = rows(40, **changed)
    assert LazyMessages.of(claimed) is None
    found = attempt.DeliveryResult()
    messages = attempt.decode_rows(claimed, {}, NOW, found)
    assert (len(found.failures), len(found.expired), len(messages)) == (failed, expired, 40 - failed - expired)
    assert list(messages)[:39] == [to_message(row) for row in claimed[:39]]
    assert all(message.due_at.tzinfo is UTC for message in messages)


def test_messages_that_differ_are_read_one_by_one():
    claimed = [{**row, "Headers": b'{"n": "%d"}' % number} for number, row in enumerate(rows(40))]
    assert LazyMessages.of(claimed) is None
    found = attempt.DeliveryResult()
    messages = attempt.decode_rows(claimed, {}, NOW, found)
    assert [message.headers["n"] for message in messages] == [str(number) for number in range(40)]


def test_none_are_none():
    assert list(attempt.decode_rows([], {}, NOW, attempt.DeliveryResult())) == []
