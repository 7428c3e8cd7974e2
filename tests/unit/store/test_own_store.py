"""A store of one's own, tested for what every store must do."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from support.own_store import FileStore

from airflow_delayed.message import utcnow
from airflow_delayed.testing.store_contract import StoreContract

SECOND = timedelta(seconds=1)


class TestFileStore(StoreContract):
    @pytest.fixture(autouse=True)
    def prepare(self, tmp_path):
        self.path, self.now = str(tmp_path / "own.db"), utcnow()

    def make_store(self):
        return FileStore(self.path, clock=lambda: self.now)

    def end_leases(self):
        self.now += timedelta(seconds=31)


class Early(FileStore):
    def fetch_batch(self, at, limit):
        return super().fetch_batch(at + SECOND if at.year < 9999 else at, limit)


class Forgetful(FileStore):
    """Holds nothing."""

    def fetch_batch(self, at, limit):
        found = super().fetch_batch(at, limit)
        self._run("UPDATE messages SET leased = 0")
        return found


class Holding(FileStore):
    """Holds until the end of time."""

    def fetch_batch(self, at, limit):
        found = super().fetch_batch(at, limit)
        self._run("UPDATE messages SET leased = 1 << 62 WHERE leased > 0")
        return found


class Newest(FileStore):
    def fetch_next_due(self, at):
        leased = super().fetch_batch(at, 99)
        self._run("UPDATE messages SET leased = 0 WHERE id != ?", leased[-1].message.message_id if leased else "")
        return leased[-1] if leased else None


class Coarse(FileStore):
    """Keeps whole milliseconds."""

    def store(self, message):
        super().store(
            replace(message, due_at=message.due_at.replace(microsecond=message.due_at.microsecond // 1000 * 1000))
        )


class Careless(FileStore):
    """Says yes to everything."""

    def initialize(self, name, consistency):
        pass

    def remove(self, leased):
        super().remove(leased)
        return True


class Uncounted(FileStore):
    def increment_failure_count(self, leased):
        return bool(self._run("UPDATE messages SET leased = 0 WHERE id = ? RETURNING id", leased.message.message_id))


class Fresh(FileStore):
    def set_up_infrastructure(self):
        self._run("DROP TABLE IF EXISTS messages")
        super().set_up_infrastructure()


class Twice(FileStore):
    def store(self, message):
        again = self._run("SELECT 1 FROM messages WHERE id = ?", message.message_id)
        super().store(replace(message, message_id=message.message_id + "'") if again else message)


class Folding(FileStore):
    def store(self, message):
        super().store(replace(message, message_id=message.message_id.lower()))


@pytest.mark.parametrize(
    "kind, test",
    [
        (Early, "nothing_is_fetched_early"),
        (Coarse, "nothing_is_fetched_early"),
        (Coarse, "a_message_comes_back_as_it_was"),
        (Newest, "what_is_due_the_longest_comes_first"),
        (Forgetful, "what_is_leased_is_passed_over"),
        (Forgetful, "a_batch_is_what_one_after_the_other_would_be"),
        (Holding, "what_a_dead_dispatcher_leased_is_fetched_again"),
        (Careless, "it_refuses_a_consistency_that_it_cannot_keep"),
        (Careless, "removing"),
        (Careless, "what_was_fetched_twice_is_removed_once"),
        (Uncounted, "failures_are_counted"),
        (Fresh, "setting_up_again_keeps_what_is_there"),
        (Twice, "the_same_message_again_is_one"),
        (Folding, "ids_are_compared_as_they_are"),
    ],
)
def test_a_store_that_does_otherwise_is_found_out(tmp_path, kind, test):
    contract = TestFileStore()
    contract.path, contract.now = str(tmp_path / "own.db"), utcnow()
    contract.make_store = lambda: kind(contract.path, clock=lambda: contract.now)
    with pytest.raises(AssertionError):
        getattr(contract, f"test_{test}")()
