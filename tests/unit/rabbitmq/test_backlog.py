"""What becomes of the messages of a send whose connection does not come back."""

from __future__ import annotations

import pytest

from airflow_delayed.errors import DestinationMissing, SendFailed, TransportUnavailable
from airflow_delayed.message import DelayedMessage, utcnow
from airflow_delayed.rabbitmq.backlog import Backlog, BodySizes, Entry

LOST = TransportUnavailable("connection 'rabbit': gone")


def backlog(number: int) -> tuple[Backlog, list[Entry]]:
    made = Backlog(
        "rabbit",
        iter(
            DelayedMessage(destination="q", body=b"", due_at=utcnow(), message_id=f"m{index}")
            for index in range(number)
        ),
    )
    taken = [made.take() for _ in range(number)]
    return made, [entry for entry in taken if entry]


def test_a_lost_connection_is_the_cause_also_after_a_message_had_failed() -> None:
    made, (first, second, third) = backlog(3)
    made.published = True
    made.confirm(first)
    made.fail(second, DestinationMissing("rabbit", ["q"], "declare it"))
    made.put_back([third])
    made.give_up(LOST)
    with pytest.raises(SendFailed, match="confirmed 1 messages and not 2") as error:
        made.outcome()
    assert error.value.__cause__ is LOST
    assert LOST.report is error.value.report
    assert dict(error.value.failures)["m2"] == str(LOST)


def test_a_reason_that_many_messages_share_stands_once() -> None:
    made, entries = backlog(9)
    made.published = True
    made.fail(entries[0], DestinationMissing("rabbit", ["q"], "declare it"))
    made.put_back(entries[1:])
    made.give_up(LOST)
    with pytest.raises(SendFailed, match=r"message m0: .*; messages m1, m2, m3, m4, m5, and 3 more: ") as error:
        made.outcome()
    assert str(error.value).count(str(LOST)) == 1


def test_a_lost_connection_is_told_if_nothing_was_published() -> None:
    made, entries = backlog(2)
    made.put_back(entries)
    made.give_up(LOST)
    with pytest.raises(TransportUnavailable) as error:
        made.outcome()
    assert error.value is LOST


def test_a_lost_connection_is_told_if_all_that_was_taken_is_confirmed() -> None:
    """More may be left in the source, which is not asked any more."""
    made, (first, second) = backlog(2)
    made.published = True
    for entry in (first, second):
        made.confirm(entry)
    made.give_up(LOST)
    with pytest.raises(TransportUnavailable) as error:
        made.outcome()
    assert error.value.report is not None
    assert error.value.report.sent == 2


@pytest.mark.parametrize(
    "text, largest",
    [
        # 3.x, 4.x
        ("PRECONDITION_FAILED - message size 2000 is larger than configured max size 1500", 1500),
        # as large as RabbitMQ allows
        ("PRECONDITION_FAILED - message size 2000 is larger than max size 1500", 1500),
        ("PRECONDITION_FAILED - invalid expiration '-1'", 10_000),
    ],
)
def test_only_a_refusal_says_how_large_a_body_may_be(text: str, largest: int) -> None:
    sizes = BodySizes()
    assert sizes.refusal(bytes(10_000)) is None
    sizes.note_refusal(text)
    assert sizes.refusal(bytes(largest)) is None
    if largest < 10_000:
        assert "has 1,501 bytes, and the broker takes 1,500" in str(sizes.refusal(bytes(1501)))
