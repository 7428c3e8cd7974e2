"""Questions to connections that may not answer, and figures that are cached."""

from __future__ import annotations

import asyncio
import threading

import pytest

from airflow_delayed.ui.hook_pool import CACHE_SECONDS, Bulkhead, Busy, FiguresCache, HookPool, TooSlow

LONG = 60.0


class Waiting(Bulkhead):
    """Waits for each answer in the thread of whoever asks."""

    def call(self, *args, **options):
        return asyncio.run(super().call(*args, **options))


def fail() -> None:
    raise KeyError("why")


def test_what_hangs_is_not_waited_for_and_holds_up_only_its_own():
    bulkhead, go = Waiting(calls=2), threading.Event()
    try:
        for _ in range(2):
            with pytest.raises(TooSlow, match=r"connection 'c' did not answer within 0\.01 seconds"):
                bulkhead.call("c", go.wait, seconds=0.01)
        # who would wait behind those that hang is told at once, however long it would wait
        with pytest.raises(Busy, match="'c' has 2 calls that did not answer"):
            bulkhead.call("c", lambda: 1, seconds=LONG)
        assert bulkhead.call("other", lambda: 1, seconds=LONG) == 1
    finally:
        go.set()
    while True:
        try:
            assert bulkhead.call("c", lambda: 1, seconds=LONG) == 1
        except Busy:
            continue
        break


def test_who_comes_while_all_are_at_work_waits_for_a_place():
    bulkhead, began, go = Waiting(calls=1), threading.Event(), threading.Event()
    found: list[int] = []

    def slow() -> int:
        began.set()
        go.wait()
        return 1

    first = threading.Thread(target=lambda: found.append(bulkhead.call("c", slow, seconds=LONG)))
    first.start()
    began.wait()
    second = threading.Thread(target=lambda: found.append(bulkhead.call("c", lambda: 2, seconds=LONG)))
    second.start()
    go.set()
    first.join()
    second.join()
    assert sorted(found) == [1, 2]


def test_the_same_figures_are_asked_for_once():
    bulkhead, began, go = Waiting(calls=1), threading.Event(), threading.Event()
    asked: list[int] = []
    found: list[int] = []

    def slow() -> int:
        asked.append(1)
        began.set()
        go.wait()
        return 7

    first = threading.Thread(target=lambda: found.append(bulkhead.call("c", slow, seconds=LONG, shared="figures")))
    first.start()
    began.wait()
    # who asks for the same waits for the same answer, and not for a place
    with pytest.raises(TooSlow):
        bulkhead.call("c", slow, seconds=0.01, shared="figures")
    with pytest.raises(Busy):
        bulkhead.call("c", slow, seconds=0.01, shared="others")
    go.set()
    first.join()
    assert (asked, found) == ([1], [7])


def test_figures_are_kept_as_long_as_they_are_worth():
    now = [100.0]
    cache = FiguresCache(lambda: now[0])

    def take(seconds: float) -> str:
        now[0] += seconds
        return f"made at {now[0]:g}"

    assert cache.get("f") is None
    assert cache.compute("f", lambda: take(0)) == "made at 100"
    now[0] += CACHE_SECONDS - 0.5
    assert cache.get("f") == ("made at 100", CACHE_SECONDS - 0.5)
    now[0] += 0.5
    assert cache.get("f") is None
    # what took a second is kept for ten from its beginning, so that it takes a tenth of the time at most
    made = cache.compute("f", lambda: take(1))
    now[0] += 8.5
    assert cache.get("f") == (made, 9.5)
    cache.invalidate("f")
    assert cache.get("f") is None
    # what a connection has kept for long, because it was frozen, is old at once
    made = cache.compute("f", lambda: take(98))
    assert cache.get("f") is None
    assert cache.get("f", expired=True) == (made, 98)


def test_figures_that_are_forgotten_while_they_are_made_are_not_kept():
    cache = FiguresCache(lambda: 0.0)

    def make() -> str:
        cache.invalidate("store")
        return "of before the change"

    turn = cache.generation("store")
    assert cache.compute("store", make) == "of before the change"
    assert cache.get("store") is None
    assert cache.generation("store") > turn


def test_figures_that_may_take_long_are_not_shown_for_ever():
    now = [100.0]
    pool = HookPool(monotonic=lambda: now[0])
    kept = 30.0, 45.0

    def figures(make):
        return asyncio.run(pool.slow_figures("c", "verify c", make, kept=kept))

    assert figures(lambda: "known") == "known"
    now[0] += 90.0
    assert figures(fail) == "known"
    now[0] += 0.1
    assert figures(fail) is None
