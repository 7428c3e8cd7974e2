from __future__ import annotations

from airflow_delayed.message import EPOCH, DelayedMessage
from airflow_delayed.rabbitmq.backlog import Entry, Unconfirmed


def published(*ids: str) -> Unconfirmed:
    unconfirmed = Unconfirmed()
    for each in ids:
        unconfirmed.add(Entry(DelayedMessage(destination="q", body=b"", due_at=EPOCH, message_id=each)))
    return unconfirmed


def settled(unconfirmed: Unconfirmed, tag: int, multiple: bool = False) -> list[tuple[str, str | None]]:
    return [(entry.message.message_id, reason) for entry, reason in unconfirmed.settle(tag, multiple)]


def test_a_confirm_is_for_one_or_for_all_up_to_it() -> None:
    unconfirmed = published("a", "b", "c", "d")
    assert settled(unconfirmed, 2) == [("b", None)]
    assert settled(unconfirmed, 3, multiple=True) == [("a", None), ("c", None)]
    assert [entry.message.message_id for entry in unconfirmed] == ["d"]
    # nothing is settled twice
    assert settled(unconfirmed, 3) == settled(unconfirmed, 3, multiple=True) == []
    assert len(unconfirmed) == 1


def test_what_was_returned_is_known_when_many_are_confirmed_at_once() -> None:
    unconfirmed = published("a", "b", "c")
    unconfirmed.returned("b", "queue is gone")
    assert settled(unconfirmed, 3, multiple=True) == [("a", None), ("b", "queue is gone"), ("c", None)]


def test_of_two_with_one_id_neither_counts_as_confirmed() -> None:
    """The broker tells no tag with a return, so which of them it was is unknown."""
    unconfirmed = published("a", "a")
    unconfirmed.returned("a", "queue is gone")
    assert settled(unconfirmed, 1) == settled(unconfirmed, 2) == [("a", "queue is gone")]
