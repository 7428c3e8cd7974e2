"""Who holds which message, on every database."""

from __future__ import annotations

from datetime import timedelta

import pytest
from support.stores import Store, message

from airflow_delayed.message import utcnow
from airflow_delayed.store import remembered_ids

pytestmark = pytest.mark.mariadb


def test_a_lease_is_taken_renewed_released_and_becomes_a_memory(store: Store):
    hook = store.installed()
    hook.send([message(f"m{number}", utcnow()) for number in range(3)])
    now, tables = utcnow(), hook.tables
    with hook.engine.begin() as connection:
        rows = remembered_ids.lock_messages(connection, tables, ["m2", "m0", "m1", "gone"])
        assert [row["Id"] for row in rows] == ["m0", "m1", "m2"]
        soon = now + timedelta(seconds=30)
        remembered_ids.record(
            connection, tables, rows[:2], remembered_ids.DISPATCHED, now, dispatcher="one", until=soon
        )
    with hook.engine.begin() as connection:
        assert remembered_ids.in_flight(connection, tables, ["m0", "m1", "m2"], now) == {"m0", "m1"}
        assert remembered_ids.in_flight(connection, tables, ["m0", "m1", "m2"], soon) == set()
        assert remembered_ids.renew(connection, tables, ["m0", "m1"], "another", soon + timedelta(hours=1)) == 0
        assert remembered_ids.renew(connection, tables, ["m0", "m1"], "one", soon + timedelta(seconds=9)) == 2
        assert remembered_ids.in_flight(connection, tables, ["m0", "m1"], soon) == {"m0", "m1"}
        assert remembered_ids.release(connection, tables, ["m0", "m1"], "another") == set()
        assert remembered_ids.release(connection, tables, ["m0"], "one") == {"m0"}
        assert remembered_ids.in_flight(connection, tables, ["m0", "m1"], now) == {"m1"}
        # once more, in place of what was there
        remembered_ids.record(connection, tables, rows, "cancelled", now)
        found = remembered_ids.find(connection, tables, ["m0", "m1", "m2", "gone"])
    assert {name: outcome for name, (_, outcome) in found.items()} == dict.fromkeys(["m0", "m1", "m2"], "cancelled")
    assert found["m1"][0] == rows[1]["Digest"]
