"""One attempt at a partition, with transports that remember."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone

import pyarrow as pa
import pytest
from support.stores import Transport

from airflow_delayed.sending import Route
from airflow_delayed.spark.options import settings_of
from airflow_delayed.spark.partition import PartitionFailed, PartitionSend, place_of
from airflow_delayed.spark.reporting import PartitionCounts

NOW = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)
HOUR = timedelta(hours=1)


class StoreOf(Transport):
    """A store that knows some ids."""

    def __init__(self, *known: str) -> None:
        super().__init__()
        self._known = {*known}
        self.noted: list[str] = []

    def known(self, ids) -> set[str]:
        return self._known & {*ids}

    def note_sent(self, messages) -> None:
        self.noted += [message.message_id for message in messages]


def batches(dues: dict[str, timedelta], size: int = 3, **columns: list) -> Iterator[pa.RecordBatch]:
    table = pa.table(
        {
            "message_id": list(dues),
            "value": [f"body of {name}" for name in dues],
            "due_at": pa.array([NOW + due for due in dues.values()], pa.timestamp("us", tz="Asia/Kolkata")),
            **columns,
        }
    )
    yield from table.to_batches(max_chunksize=size)


class Attempt:
    def __init__(self, broker: Transport, store: StoreOf | None = None, dry: bool = False, **options: str) -> None:
        settings = settings_of({"deliver": "broker", "destination": "mail", **options}, NOW)
        route = Route(delivery=broker, store=store, hold_over=settings.hold_over)
        self.progress: list[int] = []
        self.time = 0.0
        self.sending = PartitionSend(
            settings,
            None if dry else route,
            place=place_of(4, 0),
            clock=lambda: NOW,
            log=logging.getLogger("test"),
            progress=lambda counts: self.progress.append(counts.out),
            monotonic=lambda: self.time,
        )

    def run(self, rows: Iterator[pa.RecordBatch]) -> PartitionCounts:
        return self.sending.run(rows)


def test_near_and_far_and_what_the_store_knows() -> None:
    broker, store = Transport(), StoreOf("known")
    counts = Attempt(broker, store).run(batches({"far": HOUR, "near": HOUR / 10, "known": HOUR / 10}))
    assert (broker.ids, sorted(store.ids)) == (["near"], ["far", "known"])
    # so that no later job sends it again
    assert store.noted == ["near"]
    assert (counts.sent.sent, counts.stored.sent, counts.rows) == (1, 2, 3)
    assert broker.sent[0].due_at == NOW + HOUR / 10
    assert broker.sent[0].destination == "mail"


def test_messages_go_in_batches_across_those_of_arrow() -> None:
    broker = Transport()
    attempt = Attempt(broker, batch_rows="4")
    attempt.run(batches({f"m{number}": HOUR for number in range(10)}))
    assert broker.ids == [f"m{number}" for number in range(10)]
    assert attempt.progress == [4, 8, 10]


def test_a_dry_run_only_counts() -> None:
    broker = Transport()
    counts = Attempt(broker, dry=True).run(batches({"a": HOUR, "b": HOUR}))
    assert (counts.sent.sent, broker.ids) == (2, [])


def test_a_row_that_is_wrong_ends_the_attempt() -> None:
    broker = Transport()
    attempt = Attempt(broker, batch_rows="2")
    tags = ["t", "t", "t", "", "t"]
    with pytest.raises(PartitionFailed) as caught:
        attempt.run(batches({f"m{number}": HOUR for number in range(5)}, tag=tags))
    assert str(caught.value) == (
        "partition 4: its row 4, column tag: must be text, or absent. It had sent or stored 2 messages (2 to mail);"
        " another attempt means the same messages, with the same ids"
    )
    assert (broker.ids, attempt.sending.counts.out) == (["m0", "m1"], 2)


def test_a_row_beyond_a_limit_of_the_transport_is_named() -> None:
    broker = Transport(too_long={"m3"})
    with pytest.raises(PartitionFailed, match=r"its row 4, column body: has too many bytes. It had sent nothing"):
        Attempt(broker).run(batches({f"m{number}": HOUR for number in range(5)}))
    assert broker.ids == []


def test_what_was_confirmed_before_a_failure_counts() -> None:
    broker = Transport(lost_after=3, counts_when_lost=True)
    attempt = Attempt(broker)
    with pytest.raises(PartitionFailed, match="It had sent or stored 3 messages"):
        attempt.run(batches({f"m{number}": HOUR for number in range(5)}))
    assert attempt.sending.counts.sent.sent == 3


def test_past_due() -> None:
    dues = {"old": -2 * HOUR, "late": -HOUR / 2, "new": HOUR}
    with pytest.raises(PartitionFailed, match=r"row 1 was due 2026-01-31 10:00:00 UTC, more than 1:00:00 .*=skip"):
        Attempt(Transport()).run(batches(dues))
    skipped = Attempt(broker := Transport(), past_due="skip").run(batches(dues))
    assert (skipped.skipped, broker.ids) == (1, ["late", "new"])
    Attempt(broker := Transport(), past_due="send").run(batches(dues))
    assert broker.ids == ["old", "late", "new"]
    Attempt(broker := Transport(), max_past="7200").run(batches(dues))
    assert broker.ids == ["old", "late", "new"]


def test_columns_of_another_name() -> None:
    broker = Transport()
    options = {"columns": '{"message_id": "id", "value": "text", "due_at": "remind_at", "tag": "customer_id"}'}
    rows = pa.table({"id": ["a"], "text": ["b"], "remind_at": [NOW + HOUR], "customer_id": ["c1"], "price": [1]})
    Attempt(broker, **options).run(rows.to_batches())
    assert broker.ids == ["a"]
    late = pa.table({"id": ["a"], "text": ["b"], "remind_at": [None], "customer_id": ["c1"]})
    with pytest.raises(PartitionFailed, match=r"column remind_at \(due_at\)|column due_at: is null"):
        Attempt(broker, **options).run(late.to_batches())


def test_what_was_confirmed_before_a_failure_is_noted_in_the_store() -> None:
    broker, store = Transport(missing={"nobody"}), StoreOf()
    near = dict.fromkeys("abcd", timedelta(0))
    attempt = Attempt(broker, store)
    with pytest.raises(PartitionFailed, match="had sent or stored 2 messages"):
        attempt.run(batches(near, 4, destination=["mail", "mail", "nobody", "mail"]))
    assert store.noted == ["a", "b"]


def test_a_broker_that_is_away_fails_what_is_due_and_all_else_is_stored() -> None:
    broker, store = Transport(lost_after=0), StoreOf()
    dues = {f"m{number}": HOUR if number % 3 else timedelta(0) for number in range(9)}
    with pytest.raises(PartitionFailed, match="had sent or stored 6 messages"):
        Attempt(broker, store, batch_rows="2").run(batches(dues))
    assert (broker.ids, store.ids) == ([], [name for name, due in dues.items() if due])
