"""Leases are renewed in time, each by itself."""

from __future__ import annotations

from threading import Thread

from airflow_delayed.store.dispatch.renewal import ClaimedBatch, LeaseRenewer


def test_a_batch_that_is_being_settled_holds_up_no_other():
    renewed: list[str] = []
    now = 0.0
    renewer = LeaseRenewer(lambda batch: renewed.append(batch.holder), 900.0, lambda: now)
    settling, sending, fresh = (ClaimedBatch([], name, 900.0 + more) for name, more in (("a", 0), ("b", 0), ("c", 300)))
    for batch in (settling, sending, fresh):
        renewer.add(batch)
    try:
        now = 300.0
        with settling.lock:
            beside = Thread(target=renewer.renew, daemon=True)
            beside.start()
            beside.join(60)
            assert renewed == ["b"]
        # it was not settled, and so it is renewed in the next round
        sending.deadline = 1200.0
        renewer.renew()
        assert renewed == ["b", "a"]
        settling.finished, sending.lease_lost, now = True, True, 600.0
        renewer.renew()
        assert renewed == ["b", "a", "c"]
    finally:
        renewer.close()
