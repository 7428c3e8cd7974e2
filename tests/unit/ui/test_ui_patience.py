"""Questions to connections that may not answer, and figures that are kept."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from airflow_delayed.ui.kept import KEPT, Kept
from airflow_delayed.ui.patience import Busy, Patience, TooSlow

LONG = 60.0


class Waiting(Patience):
    """Waits for each answer in the thread of whoever asks."""

    def ask(self, *args, **options):
        return asyncio.run(super().ask(*args, **options))


def fail() -> None:
    raise KeyError("why")


def test_what_is_asked_is_answered():
    patience = Waiting()
    assert patience.ask("c", lambda: threading.current_thread().daemon, seconds=LONG) is True
    with pytest.raises(KeyError, match="why"):
        patience.ask("c", fail, seconds=LONG)


def test_what_hangs_is_not_waited_for_and_holds_up_only_its_own():
    patience, go = Waiting(at_once=2), threading.Event()
    try:
        for _ in range(2):
            with pytest.raises(TooSlow, match=r"connection 'c' did not answer within 0\.01 seconds"):
                patience.ask("c", go.wait, seconds=0.01)
        # who would wait behind those that hang is told at once, however long it would wait
        with pytest.raises(Busy, match="'c' has 2 questions to answer already"):
            patience.ask("c", lambda: 1, seconds=LONG)
        assert patience.ask("other", lambda: 1, seconds=LONG) == 1
    finally:
        go.set()
    while True:
        try:
            assert patience.ask("c", lambda: 1, seconds=LONG) == 1
        except Busy:
            continue
        break


def test_who_comes_while_all_are_at_work_waits_for_a_place():
    patience, began, go = Waiting(at_once=1), threading.Event(), threading.Event()
    found: list[int] = []

    def slow() -> int:
        began.set()
        go.wait()
        return 1

    first = threading.Thread(target=lambda: found.append(patience.ask("c", slow, seconds=LONG)))
    first.start()
    began.wait()
    second = threading.Thread(target=lambda: found.append(patience.ask("c", lambda: 2, seconds=LONG)))
    second.start()
    go.set()
    first.join()
    second.join()
    assert sorted(found) == [1, 2]


def test_the_same_figures_are_asked_for_once():
    patience, began, go = Waiting(at_once=1), threading.Event(), threading.Event()
    asked: list[int] = []
    found: list[int] = []

    def slow() -> int:
        asked.append(1)
        began.set()
        go.wait()
        return 7

    first = threading.Thread(target=lambda: found.append(patience.ask("c", slow, seconds=LONG, shared="figures")))
    first.start()
    began.wait()
    # who asks for the same waits for the same answer, and not for a place
    with pytest.raises(TooSlow):
        patience.ask("c", slow, seconds=0.01, shared="figures")
    with pytest.raises(Busy):
        patience.ask("c", slow, seconds=0.01, shared="others")
    go.set()
    first.join()
    assert (asked, found) == ([1], [7])


def test_figures_are_kept_as_long_as_they_are_worth():
    now = [100.0]
    kept = Kept(lambda: now[0])

    def take(seconds: float) -> str:
        now[0] += seconds
        return f"made at {now[0]:g}"

    assert kept.find("f") is None
    assert kept.make("f", lambda: take(0)) == "made at 100"
    now[0] += KEPT - 0.5
    assert kept.find("f") == ("made at 100", KEPT - 0.5)
    now[0] += 0.5
    assert kept.find("f") is None
    # what took two seconds is kept for 18, so that it takes no more than a tenth of the database's time
    made = kept.make("f", lambda: take(2))
    now[0] += 17.5
    assert kept.find("f") == (made, 17.5)
    kept.forget("f")
    assert kept.find("f") is None


def test_figures_that_are_forgotten_while_they_are_made_are_not_kept():
    kept = Kept(lambda: 0.0)

    def make() -> str:
        kept.forget("store")
        return "of before the change"

    turn = kept.turn("store")
    assert kept.make("store", make) == "of before the change"
    assert kept.find("store") is None
    assert kept.turn("store") > turn


def test_who_asks_for_figures_that_hang_is_told_at_once():
    patience, go = Waiting(), threading.Event()
    try:
        with pytest.raises(TooSlow):
            patience.ask("c", go.wait, seconds=0.01, shared="figures")
        with pytest.raises(Busy, match="'c' has not answered yet"):
            patience.ask("c", go.wait, seconds=LONG, shared="figures")
    finally:
        go.set()


def test_no_more_than_eight_wait_for_one_connection():
    patience, go = Waiting(at_once=1, waiting=8), threading.Event()
    ended: list[object] = []

    def ask() -> None:
        try:
            ended.append(patience.ask("c", go.wait, seconds=LONG, shared="figures"))
        except Busy as error:
            ended.append(error)

    threads = [threading.Thread(target=ask) for _ in range(20)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + LONG
    while len(ended) < 12 and time.monotonic() < end:
        time.sleep(0.01)
    # they were refused while the others wait; and other connections are asked meanwhile
    assert {str(error) for error in ended} == {"8 requests wait for connection 'c' already; try again in some seconds"}
    assert (len(ended), patience.ask("other", lambda: 1, seconds=LONG)) == (12, 1)
    go.set()
    for thread in threads:
        thread.join()
    assert ended[12:] == [True] * 8
    assert patience.ask("c", lambda: 1, seconds=LONG) == 1
