"""Leases are renewed in time, each by itself."""

from __future__ import annotations

from threading import Thread

from airflow_delayed.store.batch import Batch
from airflow_delayed.store.keeper import Keeper


def test_a_batch_that_is_being_settled_holds_up_no_other():
    renewed: list[str] = []
    now = 0.0
    keeper = Keeper(lambda batch: renewed.append(batch.holder), 900.0, lambda: now)
    settling, sending, fresh = (Batch([], name, 900.0 + more) for name, more in (("a", 0), ("b", 0), ("c", 300)))
    for batch in (settling, sending, fresh):
        keeper.add(batch)
    try:
        now = 300.0
        with settling.lock:
            beside = Thread(target=keeper.renew, daemon=True)
            beside.start()
            beside.join(30)
            assert renewed == ["b"]
        # it was not settled, and so it is renewed in the next round
        sending.deadline = 1200.0
        keeper.renew()
        assert renewed == ["b", "a"]
        settling.closed, sending.lost, now = True, True, 600.0
        keeper.renew()
        assert renewed == ["b", "a", "c"]
    finally:
        keeper.close()
