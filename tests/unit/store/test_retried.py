"""Which errors blame others, which blame a row, and for how long the same is tried."""

from __future__ import annotations

import pytest
from sqlalchemy import create_engine
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, OperationalError, ProgrammingError

from airflow_delayed.errors import TransportUnavailable
from airflow_delayed.store.engine import CONFLICT_WAIT, INTEGRITY_TRIES, Overtaken, in_the_way, refuses_row, retried


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


@pytest.mark.parametrize(
    "dialect, kind, cause, wanted",
    [
        # constraints
        ("mysql", OperationalError, Said(3819, "Check constraint 'c' is violated."), True),
        ("mysql", OperationalError, Said(4025, "CONSTRAINT `c` failed for `db`.`q`"), True),  # MariaDB
        ("mysql", OperationalError, Said(1364, "Field 'region' doesn't have a default value"), True),
        ("mysql", OperationalError, Said(1526, "Table has no partition for value 7"), True),
        ("mysql", IntegrityError, Said(1062, "Duplicate entry"), True),
        ("postgresql", IntegrityError, Said("violates check constraint", sqlstate="23514"), True),
        ("postgresql", ProgrammingError, Said("violates check option", sqlstate="44000"), True),
        ("sqlite", IntegrityError, Said("CHECK constraint failed"), True),
        # triggers
        ("mysql", OperationalError, Said(1644, "no room"), True),
        ("mysql", DBAPIError, Said("1644 (45000): no room", errno=1644), True),  # mysql-connector-python
        ("postgresql", DBAPIError, Said("no room", sqlstate="P0001"), True),
        ("postgresql", DBAPIError, Said("no room", pgcode="45000"), True),
        # encodings
        ("mysql", OperationalError, Said(1366, "Incorrect string value"), True),
        ("mysql", OperationalError, Said(3140, "Invalid JSON text"), True),
        ("mysql", OperationalError, Said(3988, "Conversion from collation"), True),
        ("postgresql", DataError, Said("has no equivalent in LATIN1", sqlstate="22P05"), True),
        # lengths
        ("mysql", DataError, Said(1406, "Data too long"), True),
        ("mysql", OperationalError, Said(1118, "Row size too large"), True),
        ("postgresql", OperationalError, Said("index row size 4016", sqlstate="54000"), True),
        ("sqlite", DataError, Said("string or blob too big"), True),
        # a full disk or table
        ("mysql", OperationalError, Said(1114, "The table 'q' is full"), False),
        ("mysql", OperationalError, Said(1021, "Disk full"), False),
        ("postgresql", OperationalError, Said("could not extend file", sqlstate="53100"), False),
        ("sqlite", OperationalError, Said("database or disk is full"), False),
        # read-only
        ("mysql", OperationalError, Said(1290, "running with the --read-only option"), False),
        ("mysql", OperationalError, Said(1036, "Table 'q' is read only"), False),
        ("postgresql", DBAPIError, Said("read-only transaction", sqlstate="25006"), False),
        # locks and deadlocks
        ("mysql", OperationalError, Said(1205, "Lock wait timeout"), False),
        ("mysql", OperationalError, Said(1213, "Deadlock found"), False),
        ("postgresql", OperationalError, Said("lock timeout", sqlstate="55P03"), False),
        ("postgresql", OperationalError, Said("deadlock", sqlstate="40P01"), False),
        ("postgresql", OperationalError, Said("statement timeout", sqlstate="57014"), False),
        ("sqlite", OperationalError, Said("database is locked"), False),
        # connections
        ("mysql", OperationalError, Said(1040, "Too many connections"), False),
        ("mysql", OperationalError, Said(2006, "Server has gone away"), False),
        ("postgresql", OperationalError, Said("too many clients", sqlstate="53300"), False),
        ("postgresql", OperationalError, Said("server closed the connection"), False),
        # rights, and tables that were changed
        ("mysql", OperationalError, Said(1142, "INSERT command denied"), False),
        ("mysql", OperationalError, Said(1054, "Unknown column 'body'"), False),
        ("mysql", ProgrammingError, Said(1146, "Table 'q' doesn't exist"), False),
        ("postgresql", ProgrammingError, Said("permission denied", sqlstate="42501"), False),
        ("postgresql", ProgrammingError, Said("no relation q", sqlstate="42P01"), False),
    ],
)
def test_which_errors_are_of_a_row(dialect, kind, cause, wanted):
    assert refuses_row(Engine(dialect), kind("", {}, cause)) is wanted


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
