"""Which process of a run plays which tests, and in which order: files that share what is costly to start stay together.

pytest-xdist's own groups are marks, which its scheduler (3.8) does not see under pytest 9; so they are listed here.
"""

from __future__ import annotations

from collections import Counter

import pytest
from xdist.scheduler import LoadScopeScheduling

#: Folders and files that one process plays, by what they share. Longest first: the run ends when the last one does.
GROUPS = {
    "the live Airflow": ("tests/acceptance/",),
    "the demo": ("tests/acceptance/test_demo.py",),
    "one Spark": (
        "tests/integration/test_spark_",
        "tests/integration/test_docs_spark.py",
        "tests/integration/test_flight_reminders_",
    ),
    "a broker that is stopped": (
        "tests/integration/test_rabbitmq_alarms.py",
        "tests/integration/test_rabbitmq_faults.py",
        "tests/integration/test_rabbitmq_tls.py",
    ),
}


def scope_of(nodeid: str) -> str:
    """Return the group of a test, or its file."""
    file = nodeid.partition("::")[0]
    # the longest name says most: a file of a folder may be a group of its own
    fitting = [(len(name), group) for group, names in GROUPS.items() for name in names if file.startswith(name)]
    return max(fitting)[1] if fitting else file


def order(items: list[pytest.Item]) -> None:
    """Sort tests: the groups as they are listed, then the files with the most tests."""
    groups, tests = list(GROUPS), Counter(scope_of(item.nodeid) for item in items)

    def rank(item: pytest.Item) -> tuple[int, int]:
        scope = scope_of(item.nodeid)
        return groups.index(scope) if scope in GROUPS else len(groups), -tests[scope]

    items.sort(key=rank)


class Scopes(LoadScopeScheduling):
    """Gives each process a group or a file at a time; in the order of the tests with --no-loadscope-reorder."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)
