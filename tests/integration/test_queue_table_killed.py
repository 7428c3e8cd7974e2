"""A triggerer that watches a queue table is killed again and again: no row is lost, and none is there after all."""

from __future__ import annotations

import random
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from support.forked import Child
from support.lengths import length
from support.row_watching import watch
from support.stores import Store, message

pytestmark = pytest.mark.long

ROWS = length("rows of a queue table whose triggerer is killed", 300, 3_000)
KILLS = length("kills of a triggerer of a queue table", 3, 12)
BATCH = 20
PATIENCE = 120


def test_a_killed_triggerer_loses_no_row(store: Store, tmp_path: Path) -> None:
    hook = store.installed("q", deliver_conn_id=None)
    names = [f"m{number:04}" for number in range(ROWS)]
    hook.send(message(name, hook.now()) for name in names)
    store.dispatcher(hook).run()
    journal = tmp_path / "journal"
    journal.touch()
    chance = random.Random(7)
    arguments = {"journal": str(journal), "batch_size": BATCH, "conn_id": store.conn_id, "schema": store.schema}
    for kill in range(KILLS + 1):
        with closing(Child(watch, queue="q", **arguments)) as child:
            # some events are made, and the kill comes before, between and after storing and deleting
            child.answer()
            if kill < KILLS:
                time.sleep(chance.random() / 5)
                child.kill()
                continue
            deadline = time.monotonic() + PATIENCE
            while store.rows(hook, "q"):
                assert time.monotonic() < deadline
                time.sleep(0.05)
    stored = Counter(journal.read_text().split())
    assert stored.keys() == set(names)
    # at each kill one event may have been stored and not deleted yet
    assert sum(stored.values()) - ROWS <= KILLS * BATCH
