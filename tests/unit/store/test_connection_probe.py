"""A dispatcher's looks at a connection through which nothing is due."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from threading import Event
from time import monotonic, sleep

import pytest

from airflow_delayed.errors import TransportUnavailable
from airflow_delayed.store.dispatch import probe
from airflow_delayed.store.dispatch.probe import ConnectionProbe
from airflow_delayed.store.dispatch.report import TroubleKind

START = datetime(2026, 5, 4, tzinfo=timezone.utc)


class Transport:
    """Does what a test wants, in each of its looks."""

    def __init__(self, look: Callable[[], object]) -> None:
        self.probe = look
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def eventually(holds: Callable[[], object]) -> None:
    ends = monotonic() + 60
    while not holds():
        assert monotonic() < ends
        sleep(0.01)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PROBE_EVERY", 0.01)


def test_a_failure_lasts_since_its_first_look_and_ends_with_an_answer():
    answers, made, moments = Event(), [], iter(range(1_000_000))

    def look() -> None:
        if not answers.is_set():
            raise TransportUnavailable("connection 'rabbit': nothing listens")

    def make() -> Transport:
        made.append(Transport(look))
        return made[-1]

    looks = ConnectionProbe("rabbit", make, lambda: START + timedelta(seconds=next(moments)))
    eventually(lambda: len(made) > 3)
    trouble = looks.trouble(START)
    assert (trouble.kind, trouble.conn_id, trouble.destination) == (TroubleKind.CONNECTION, "rabbit", None)
    assert (trouble.since, trouble.reason) == (START, "nothing listens")
    # with what Airflow has of the connection then
    assert all(one.closed for one in made[:3])
    answers.set()
    eventually(lambda: looks.trouble(START) is None)
    looks.close()
    assert made[-1].closed == 1


def test_an_open_connection_that_was_closed_is_opened_again_at_once():
    made: list[Transport] = []

    def make() -> Transport:
        answers = iter([None] if not made else [])

        def look() -> None:
            if len(made) == 1 and next(answers, "closed") == "closed":
                raise TransportUnavailable("connection 'rabbit': reset by peer")

        made.append(Transport(look))
        return made[-1]

    seen = []
    looks = ConnectionProbe("rabbit", make, lambda: START)
    eventually(lambda: seen.append(looks.trouble(START)) or len(made) == 2)
    looks.close()
    assert set(seen) == {None}


def test_a_connection_that_hangs_does_not_work():
    begun, ends = Event(), Event()

    def look() -> None:
        begun.set()
        ends.wait(60)

    looks = ConnectionProbe("rabbit", lambda: Transport(look), lambda: START)
    assert begun.wait(60)
    assert looks.trouble(START + timedelta(seconds=4)) is None
    trouble = looks.trouble(START + timedelta(seconds=6))
    assert (trouble.since, trouble.reason) == (START, "no answer in time")
    ends.set()
    looks.close()


def test_a_connection_that_answers_after_the_end_is_closed():
    begun, goes_on, made = Event(), Event(), []

    def make() -> Transport:
        begun.set()
        goes_on.wait(60)
        made.append(Transport(lambda: None))
        return made[-1]

    looks = ConnectionProbe("rabbit", make, lambda: START)
    assert begun.wait(60)
    looks.close(0)
    goes_on.set()
    eventually(lambda: made and made[0].closed)
