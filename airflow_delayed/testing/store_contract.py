"""The contract of a custom store (:mod:`airflow_delayed.store.protocol`), as tests to run on it.

For pytest, or any runner that makes an object for each method called ``test_...``::

    class TestMyStore(StoreContract):
        @pytest.fixture(autouse=True)
        def prepare(self, tmp_path):
            self.path, self.now = tmp_path / "store.db", utcnow()

        def make_store(self):
            return MyStore(self.path, clock=lambda: self.now)

        def end_leases(self):
            self.now += timedelta(hours=1)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any, cast

from airflow_delayed.message import UTC, DelayedMessage
from airflow_delayed.store.protocol import (
    Consistency,
    DelayedMessageStore,
    FetchesBatches,
    LeasedMessage,
    UnsupportedConsistency,
)

#: When the first message of a test is due, a time with microseconds.
DUE = datetime(2030, 1, 31, 8, 30, 0, 123457, UTC)
#: By then all messages of a test are due.
AFTER = datetime.max.replace(tzinfo=UTC)
SECOND = timedelta(seconds=1)


class StoreContract(ABC):
    """Tests of one store. Each begins with an empty store; all objects that a test makes share its messages.

    Experimental: it may change without a deprecation before (docs/development/stability.md).
    """

    #: Whether the store keeps what "exactly_once" asks for.
    keeps_exactly_once = False

    @abstractmethod
    def make_store(self) -> DelayedMessageStore:
        """Return an object on the test's store, as another dispatcher would have, not initialized yet."""

    @abstractmethod
    def end_leases(self) -> None:
        """End all leases, by moving the clock that the store uses, so that no test has to wait."""

    def opened(self) -> DelayedMessageStore:
        """Return an object that is ready for use."""
        store = self.make_store()
        store.initialize("contract", "at_least_once")
        store.set_up_infrastructure()
        return store

    def filled(self, *names: str) -> DelayedMessageStore:
        """Return a store with these messages, each due a second after the one before."""
        store = self.opened()
        for number, name in enumerate(names):
            store.store(message(name, DUE + number * SECOND))
        return store

    def test_an_empty_store_has_nothing(self) -> None:
        """No message is due, now or later."""
        store = self.opened()
        assert store.fetch_next_due(AFTER) is None
        assert store.next_due() is None

    def test_it_refuses_a_consistency_that_it_cannot_keep(self) -> None:
        """A destination that does not exist, and exactly_once unless the store says that it can."""
        assert _refuses(self.make_store(), "maybe_once")
        assert _refuses(self.make_store(), "exactly_once") is not self.keeps_exactly_once

    def test_setting_up_again_keeps_what_is_there(self) -> None:
        """A dispatcher sets up at each start."""
        self.filled("a").set_up_infrastructure()
        assert drained(self.opened()) == ["a"]

    def test_a_message_comes_back_as_it_was(self) -> None:
        """Every field, to the microsecond and the byte."""
        full = message(
            r"7d0c1f3e-6f0c-4d0f-9a63-1f2a7c0e4d11\12345",
            DUE,
            destination="Acme.Sales \u00fc",
            body=bytes(range(256)) * 300,
            headers={"key": "\u00fc \U0001f600 <b> 'quoted' \"\n", "empty": ""},
            tag="customer 7",
            expires_at=DUE + SECOND,
        )
        bare = message("b", AFTER - SECOND, body=b"")
        store = self.opened()
        store.store(full)
        store.store(bare)
        other = self.opened()
        for wanted in (full, bare):
            found = fetched(other)
            assert (found.message, found.failures) == (wanted, 0)

    def test_nothing_is_fetched_early(self) -> None:
        """Not by a microsecond; right after it is due it is fetched."""
        store = self.filled("a")
        assert store.fetch_next_due(DUE - timedelta(microseconds=1)) is None
        assert store.next_due() == DUE
        assert fetched(store, DUE + timedelta(microseconds=1)).message.message_id == "a"

    def test_what_is_due_the_longest_comes_first(self) -> None:
        """In whatever order they were stored."""
        store = self.opened()
        for number in (2, 0, 1):
            store.store(message(f"m{number}", DUE + number * SECOND))
            assert store.next_due() == DUE + (2 if number == 2 else 0) * SECOND
        assert drained(store) == ["m0", "m1", "m2"]

    def test_the_same_message_again_is_one(self) -> None:
        """A task that is tried again stores again."""
        store = self.filled("a")
        store.store(message("a", DUE))
        assert drained(store) == ["a"]

    def test_ids_are_compared_as_they_are(self) -> None:
        """A and a are two."""
        assert sorted(drained(self.filled("a", "A"))) == ["A", "a"]

    def test_what_is_leased_is_passed_over(self) -> None:
        """By this dispatcher and by others."""
        store, other = self.filled("a", "b"), self.opened()
        assert fetched(store).message.message_id == "a"
        assert fetched(other).message.message_id == "b"
        assert store.fetch_next_due(AFTER) is None
        assert other.fetch_next_due(AFTER) is None

    def test_what_a_dead_dispatcher_leased_is_fetched_again(self) -> None:
        """When its lease has ended, with no failure counted."""
        fetched(self.filled("a"))
        other = self.opened()
        assert other.fetch_next_due(AFTER) is None
        self.end_leases()
        assert fetched(other).failures == 0

    def test_removing(self) -> None:
        """It says whether the message was still there."""
        store = self.filled("a", "b")
        leased = fetched(store)
        assert store.remove(leased) is True
        assert store.remove(leased) is False
        assert store.increment_failure_count(leased) is False
        self.end_leases()
        assert drained(store) == ["b"]
        assert store.next_due() is None

    def test_what_was_fetched_twice_is_removed_once(self) -> None:
        """A dispatcher that lost its lease removes it, or the dispatcher that has the message now."""
        store, other = self.filled("a"), self.opened()
        first = fetched(store)
        self.end_leases()
        second = fetched(other)
        assert [store.remove(first), other.remove(second)].count(True) == 1
        self.end_leases()
        assert self.opened().fetch_next_due(AFTER) is None

    def test_failures_are_counted(self) -> None:
        """A counted failure also ends the lease of the message."""
        store = self.filled("a", "b")
        for count in range(3):
            leased = fetched(store)
            assert (leased.message.message_id, leased.failures) == ("a", count)
            assert store.increment_failure_count(leased) is True
        assert store.next_due() == DUE
        assert fetched(self.opened()).failures == 3

    def test_many_at_once_fetch_nothing_twice(self) -> None:
        """Four dispatchers, each with an object of its own."""
        names = [f"m{number}" for number in range(40)]
        self.filled(*names)
        with ThreadPoolExecutor(4) as threads:
            parts = list(threads.map(lambda _: drained(self.opened()), range(4)))
        assert sorted(name for part in parts for name in part) == sorted(names)

    def test_a_batch_is_what_one_after_the_other_would_be(self) -> None:
        """If the store can fetch batches."""
        store, other = self.filled("a", "b", "c", "d"), self.opened()
        if isinstance(store, FetchesBatches):
            assert list(store.fetch_batch(DUE - SECOND, 9)) == []
            assert _ids(store.fetch_batch(AFTER, 2)) == ["a", "b"]
            assert _ids(store.fetch_batch(DUE + 2 * SECOND + timedelta(microseconds=1), 9)) == ["c"]
            assert other.fetch_next_due(DUE + 2 * SECOND + timedelta(microseconds=1)) is None
            assert _ids(store.fetch_batch(AFTER, 9)) == ["d"]


def message(name: str, due_at: datetime, **fields: Any) -> DelayedMessage:
    """Return a message."""
    return DelayedMessage(**{"destination": "q", "body": b"body", "message_id": name, "due_at": due_at, **fields})


def fetched(store: DelayedMessageStore, at: datetime = AFTER) -> LeasedMessage:
    """Fetch a message that must be there."""
    leased = store.fetch_next_due(at)
    assert leased is not None
    return leased


def drained(store: DelayedMessageStore) -> list[str]:
    """Fetch and remove all messages without a lease, and return their ids in the order of the fetches."""
    names = []
    while (leased := store.fetch_next_due(AFTER)) is not None:
        assert store.remove(leased) is True
        names.append(leased.message.message_id)
    return names


def _ids(batch: Any) -> list[str]:
    return [leased.message.message_id for leased in batch]


def _refuses(store: DelayedMessageStore, consistency: str) -> bool:
    try:
        store.initialize("contract", cast(Consistency, consistency))
    except UnsupportedConsistency:
        return True
    return False
