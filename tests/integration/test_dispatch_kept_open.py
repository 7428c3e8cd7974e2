"""A dispatcher that stays keeps its connection open, and says that it does not work also while nothing is due."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

import pytest
from support.rabbitmq import eventually
from support.stores import Store, Transport, message

from airflow_delayed.delivery import Finding
from airflow_delayed.errors import TransportUnavailable
from airflow_delayed.hooks.store import DelayedStoreHook

pytestmark = pytest.mark.parametrize("store", ["sqlite"], indirect=True)

DISPATCHER = "airflow_delayed.store.dispatch.dispatcher"


class KeptTransport(Transport):
    """Does in each look at its connection what a test wants."""

    def __init__(self, look: Callable[[], object]) -> None:
        super().__init__()
        self.service = look
        self.opened = 0

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        self.opened += 1
        yield


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{DISPATCHER}.HEARTBEAT", 0.05)
    monkeypatch.setattr(f"{DISPATCHER}.SERVICE_EVERY", 0.01)


def fails(hook: DelayedStoreHook) -> Finding | None:
    return next((one for one in hook.health() if one.code == "connection-fails"), None)


def test_a_failure_is_said_since_its_first_look_until_an_answer(store: Store, caplog: pytest.LogCaptureFixture):
    works, looks = Event(), []

    def look() -> None:
        looks.append(None)
        if not works.is_set():
            raise TransportUnavailable("connection 'broker': nothing listens")

    hook = store.installed()
    dispatcher = store.dispatcher(hook, KeptTransport(look), stays=True)
    dispatcher.once()
    eventually(lambda: fails(hook))
    first = fails(hook)
    assert first is not None
    assert (first.deliver_conn_id, first.destination, first.why) == ("broker", None, "nothing is overdue yet")
    assert str(first.found).endswith(": nothing listens")
    seen = len(looks)
    eventually(lambda: len(looks) > seen + 3)
    last = fails(hook)
    assert last is not None
    assert last.since == first.since
    works.set()
    eventually(lambda: fails(hook) is None)
    dispatcher.close()
    logged = [one for one in caplog.messages if "connection 'broker'" in one]
    assert ["nothing listens; it is tried again" in logged[0], *logged[1:]] == [True, "connection 'broker' works again"]


def test_a_connection_that_hangs_does_not_work_and_is_closed_when_it_answers(
    store: Store, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("airflow_delayed.store.dispatch.worker._SILENT_AFTER", 0.2)
    monkeypatch.setattr(f"{DISPATCHER}.SERVICE_ENDS", 0.01)
    begun, goes_on = Event(), Event()

    def look() -> None:
        begun.set()
        goes_on.wait(120)

    hook, transport = store.installed(), KeptTransport(look)
    dispatcher = store.dispatcher(hook, transport, stays=True)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(dispatcher.run, "stopped")
        assert begun.wait(120)
        eventually(lambda: fails(hook))
        found = fails(hook)
        dispatcher.stop()
        run.result(120)
    assert found is not None
    assert str(found.found).endswith(": no answer in time")
    assert transport.closed == 0
    goes_on.set()
    eventually(lambda: transport.closed)


def test_messages_go_over_the_connection_that_is_open(store: Store):
    looks = Event()
    hook, transport = store.installed(), KeptTransport(looks.set)
    dispatcher = store.dispatcher(hook, transport, stays=True)
    dispatcher.once()
    assert looks.wait(120)
    for name in "ab":
        hook.send([message(name, hook.now())])
        eventually(lambda: dispatcher.once() and transport.ids[-1:] == [name])  # noqa: B023
    assert (transport.opened, transport.closed) == (1, 0)
    dispatcher.close()
    assert transport.closed == 1
