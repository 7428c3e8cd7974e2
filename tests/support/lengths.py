"""How long tests are that can be short or long: `make test` plays each fault, `make test-long` plays it often.

A test module asks when it is imported, so that the end of a long run can say what ran at which length.
"""

from __future__ import annotations

import os
from typing import TypeVar

import pytest

T = TypeVar("T")

#: Set by `make test-long`.
LONG = os.environ.get("TEST_LENGTH") == "long"
#: What has a length of its own, and that length in this run.
LENGTHS: dict[str, str] = {}
#: The lines of what tests of a long run measured, by title; for its summary.
TABLES: dict[str, list[str]] = {}


def length(what: str, short: T, long: T) -> T:
    """Return one of two lengths.

    :param what: is counted, such as "kills of a dispatcher"; for the summary of a long run.
    """
    chosen = long if LONG else short
    LENGTHS[what] = f"{chosen}" + (f" (in make test: {short})" if LONG else f" (in make test-long: {long})")
    return chosen


def is_long(item: pytest.Item) -> bool:
    """Return whether only a long run plays a test: one of its mark, a fuzzer, or one on MariaDB without that mark."""
    parameters = getattr(item, "callspec", None)
    on_mariadb = parameters is not None and parameters.params.get("store") == "mariadb"
    marks = {mark.name for mark in item.iter_markers()}
    return bool(marks & {"long", "fuzz"}) or (on_mariadb and "mariadb" not in marks)
