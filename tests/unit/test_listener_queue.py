"""The queue of the listener: whoever puts a change there never waits, whatever its thread waits for."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from threading import Event, current_thread, main_thread

import pytest

from airflow_delayed.notifications import listener
from airflow_delayed.notifications.listener import ChangeQueue, Pending, StateChange
from airflow_delayed.notifications.store_calls import calls_of

SOON = 30


def change(number: int = 0) -> StateChange:
    return StateChange(dag_id="etl", run_id=f"run {number}", state="failed")


class Calls:
    """Work that is a function."""

    def __init__(self, call: Callable[[Pending, float], float | None]) -> None:
        self._call = call
        self.rests = Event()

    def __call__(self, pending: Pending, age: float) -> float | None:
        return self._call(pending, age)

    def rest(self) -> None:
        self.rests.set()


class Store:
    """Work that takes as long as the test wants."""

    def __init__(self) -> None:
        self.asked, self.answers = Event(), Event()
        self.worked: list[str] = []

    def __call__(self, pending: Pending, age: float) -> float | None:
        assert current_thread() is not main_thread()
        self.asked.set()
        assert self.answers.wait(SOON)
        self.worked.append(pending.change.run_id)
        return None

    def rest(self) -> None:
        """Nothing is open."""


def test_a_thousand_changes_are_put_while_the_store_says_nothing_and_none_is_lost():
    store = Store()
    queue = ChangeQueue(store)
    queue.put(change(0))
    assert store.asked.wait(SOON)
    # from here on the thread waits for the store; if a put waited for the thread, this would never end
    for number in range(1, 1000):
        queue.put(change(number))
    assert (len(queue), store.worked, queue.dropped) == (1000, [], 0)
    store.answers.set()
    assert queue.finish(SOON)
    assert store.worked == [f"run {number}" for number in range(1000)]


def test_what_does_not_fit_is_dropped_counted_and_logged_once(caplog):
    store = Store()
    queue = ChangeQueue(store, limit=10)
    with caplog.at_level(logging.ERROR):
        for number in range(50):
            queue.put(change(number))
    # the first one may be with the thread, and no longer in the queue
    assert queue.dropped in (39, 40)
    (line,) = [one.getMessage() for one in caplog.records]
    assert "10 changes wait for the store already, so the listener drops this one" in line
    store.answers.set()
    assert queue.finish(SOON)
    assert len(store.worked) == 50 - queue.dropped


def test_work_that_is_not_done_goes_on_after_the_seconds_that_it_asks_for():
    now, ages, again = [0.0], [], Event()

    def work(pending: Pending, age: float) -> float | None:
        ages.append(age)
        if len(ages) == 2:
            again.set()
        return None if age >= 30 else 30 - age

    queue = ChangeQueue(Calls(work), clock=lambda: now[0])
    queue.put(change())
    while not ages or len(queue._waiting) != 1:
        pass
    assert (ages, again.is_set()) == ([0.0], False)
    now[0] = 30.0
    # whatever is put wakes the thread
    queue.put(change(1))
    assert again.wait(SOON)
    assert ages[:2] == [0.0, 30.0]


def test_an_error_ends_the_work_on_one_change_alone(caplog):
    worked: list[str] = []

    def work(pending: Pending, age: float) -> None:
        if pending.change.run_id == "run 0":
            raise RuntimeError("broken")
        worked.append(pending.change.run_id)

    queue = ChangeQueue(Calls(work))
    for number in range(3):
        queue.put(change(number))
    assert queue.finish(SOON)
    assert worked == ["run 1", "run 2"]
    assert "DAG etl, run run 0, failed: the listener could not work on it: RuntimeError" in caplog.text


def test_at_the_end_of_a_process_nothing_is_put_off():
    ages: list[float] = []

    def work(pending: Pending, age: float) -> float | None:
        ages.append(age)
        return None if age > 1e6 else 3600.0

    queue = ChangeQueue(Calls(work))
    queue.put(change())
    assert queue.finish(SOON)
    assert ages[-1] == float("inf")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_has_a_thread_and_a_queue_of_its_own():
    store = Store()
    queue = ChangeQueue(store)
    os.register_at_fork(after_in_child=queue.forget)
    for number in range(3):
        queue.put(change(number))
    reader, writer = os.pipe()
    if not (child := os.fork()):
        try:
            store.answers.set()
            store.worked.clear()
            empty = len(queue) == 0
            queue.put(change(9))
            os.write(writer, f"{empty} {queue.finish(SOON)} {store.worked}".encode())
        finally:
            os._exit(0)
    assert os.read(reader, 1000).decode() == "True True ['run 9']"
    os.waitpid(child, 0)
    for end in (reader, writer):
        os.close(end)
    store.answers.set()
    assert queue.finish(SOON)
    assert store.worked == ["run 0", "run 1", "run 2"]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_asks_a_store_by_connections_of_its_own():
    mine = calls_of("db")
    if not (child := os.fork()):
        os._exit(0 if calls_of("db") is not mine and calls_of("db") is calls_of("db") else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert calls_of("db") is mine


def test_the_thread_lets_go_of_connections_when_nothing_comes(monkeypatch):
    monkeypatch.setattr(listener, "IDLE", 0.01)
    work = Calls(lambda pending, age: None)
    queue = ChangeQueue(work)
    queue.put(change())
    assert work.rests.wait(SOON)
    queue.put(change())
    assert queue.finish(SOON)
