"""Which errors say only that others were in the way, and for how long the same is tried."""

from __future__ import annotations

import pytest
from sqlalchemy import create_engine
from sqlalchemy.exc import IntegrityError, OperationalError

from airflow_delayed.errors import TransportUnavailable
from airflow_delayed.store.engine import CONFLICT_WAIT, INTEGRITY_TRIES, Overtaken, in_the_way, retried


class Said(Exception):
    """A driver's error."""

    def __init__(self, *args: object, **codes: object) -> None:
        super().__init__(*args)
        self.__dict__.update(codes)


class Engine:
    def __init__(self, name: str) -> None:
        self.dialect = type("Dialect", (), {"name": name})


@pytest.mark.parametrize(
    "dialect, cause, wanted",
    [
        ("postgresql", Said("deadlock", sqlstate="40P01"), True),  # psycopg
        ("postgresql", Said("canceling", pgcode="55P03"), True),  # psycopg2
        ("postgresql", Said("no such column", sqlstate="42703"), False),
        ("mysql", Said(1213, "Deadlock found"), True),
        ("mariadb", Said(1205, "Lock wait timeout"), True),
        ("mysql", Said("1213 (40001): Deadlock found", errno=1213), True),  # mysql-connector-python
        ("mysql", Said(2006, "Server has gone away"), False),
        ("sqlite", Said("database is locked"), False),
    ],
)
def test_who_is_in_the_way(dialect, cause, wanted):
    assert in_the_way(Engine(dialect), OperationalError("", {}, cause)) is wanted


@pytest.fixture
def engine():
    engine = create_engine("sqlite://")
    yield engine
    engine.dispose()


def test_patience_comes_to_an_end(engine):
    seconds = 0.0
    naps = []

    def sleep(nap: float) -> None:
        nonlocal seconds
        naps.append(nap)
        seconds += nap

    def work(connection) -> None:
        raise Overtaken("m1")

    with pytest.raises(TransportUnavailable, match="others keep changing the same messages: m1; try again"):
        retried(engine, work, sleep=sleep, monotonic=lambda: seconds)
    assert CONFLICT_WAIT <= seconds < CONFLICT_WAIT + 1
    assert max(naps) < 0.5


def test_a_rule_that_is_broken_is_not_tried_for_long(engine):
    tries = []

    def work(connection) -> None:
        tries.append(1)
        raise IntegrityError("", {}, Said("UNIQUE"))

    with pytest.raises(IntegrityError):
        retried(engine, work, sleep=lambda nap: None)
    assert len(tries) == INTEGRITY_TRIES
