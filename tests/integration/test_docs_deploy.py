"""docs/deploy/schedulers.md: how many connections and threads a dispatcher has."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from sqlalchemy import event
from sqlalchemy.pool import QueuePool
from support.stores import Store, Transport, message

pytestmark = pytest.mark.long

PAGE = Path(__file__).resolve().parents[2] / "docs/deploy/schedulers.md"


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
def test_connections_and_threads_of_a_dispatcher(store: Store) -> None:
    now = store.installed("q").now()
    for deliver_conn_id in ("broker", None):
        sender = store.hook(deliver_conn_id)
        sender.send(message(f"{deliver_conn_id}{number}", now) for number in range(1500))
        sender.close()
    # one that has no connection yet
    hook = store.hook()
    pool = hook.engine.pool
    assert isinstance(pool, QueuePool)
    assert f"at most {pool.size() + pool._max_overflow}. Usually" in PAGE.read_text()
    connections: set[int] = set()
    most, threads = 0, set()

    def opened(driver: object, *_: object) -> None:
        nonlocal most
        connections.add(id(driver))
        most = max(most, len(connections))
        threads.update(one.name for one in threading.enumerate())

    event.listen(hook.engine, "connect", opened)
    for name in ("close", "close_detached"):
        event.listen(hook.engine, name, lambda driver, *_: connections.discard(id(driver)))
    before = {one.name for one in threading.enumerate()}
    dispatcher = store.dispatcher(hook, Transport(), deliver_conn_ids=["broker", hook.conn_id])
    assert dispatcher.run(until="empty").dispatched == 3000
    made = {name for name in threads - before if name.startswith("delayed-")}
    workers = {name for name in made if name.startswith("delayed-dispatch_")}
    assert 2 <= most <= pool.size() + pool._max_overflow
    assert "two for each connection that it delivers through, and up to five more" in PAGE.read_text()
    assert 2 <= len(workers) <= 4
    assert 1 <= len(made - workers) <= 5
