"""Which process of a run plays which tests, and in which order: files that share what is costly to start stay together.

pytest-xdist's own groups are marks, which its scheduler (3.8) does not see under pytest 9; so they are listed here.
"""

from __future__ import annotations

from collections import Counter

import pytest
from xdist.scheduler import LoadScopeScheduling

#: Folders and files that one process plays, by what they share. Longest first: the run ends when the last one does. But
#: the demo comes late, for the live Airflow and Spark need all cores in the beginning.
GROUPS = {
    "the live Airflow": ("tests/acceptance/",),
    # idle levels cost the broker, so there are few virtual hosts of them
    "virtual hosts with delay levels": (
        "tests/integration/rabbitmq/",
        "tests/integration/above_sql/test_dispatch_refused.py",
        "tests/integration/above_sql/test_traces.py",
        "tests/integration/test_doctor.py",
        "tests/integration/test_first_send.py",
        "tests/integration/test_own_store_dispatch.py",
        "tests/integration/test_paused_messages.py",
    ),
    "one Spark": ("tests/integration/spark/",),
    "a fork server, for processes that are killed": (
        "tests/integration/test_dispatch_faults.py",
        "tests/integration/test_dispatcher_service.py",
        "tests/integration/test_inbox.py",
        "tests/integration/test_store_stay.py",
        "tests/integration/test_sqs_cycle.py",
        "tests/integration/test_sqs_cycle_faults.py",
        "tests/integration/test_sqs_killed.py",
        "tests/integration/test_sqs_life.py",
    ),
    "a broker that is stopped": ("tests/integration/rabbitmq/stopped/",),
    "the demo": ("tests/acceptance/test_demo.py",),
    "DAGs that run in the test's process": (
        "tests/integration/above_sql/test_change_tasks.py",
        "tests/integration/test_dag_author.py",
        "tests/integration/test_delayed_fixture.py",
        "tests/integration/test_docs_examples.py",
        "tests/integration/test_docs_sqs.py",
        "tests/integration/test_docs_store.py",
        "tests/integration/test_docs_testing.py",
        "tests/integration/test_escalation_example.py",
        "tests/integration/test_install_topology_dag.py",
        "tests/integration/test_links.py",
        "tests/integration/test_metrics.py",
        "tests/integration/test_openlineage.py",
        "tests/integration/test_row_sources.py",
        "tests/integration/test_sqs_long_delays_dag.py",
        "tests/integration/test_sqs_sensor.py",
        "tests/integration/test_store_dags.py",
        "tests/integration/test_try_it_dag.py",
    ),
    "the page": ("tests/integration/ui/test_ui_",),
}

#: Files of which each is played alone and takes more than 15 s, longest first.
LONG_FILES = (
    "tests/integration/ui/test_broken_setups.py",
    "tests/integration/test_docs_site.py",
    "tests/integration/test_dispatch_standstill.py",
    "tests/integration/test_store_large_rows.py",
    "tests/integration/test_store_unreadable.py",
    "tests/integration/test_docs_rabbitmq.py",
    "tests/integration/test_store_progress.py",
    "tests/integration/test_oldest_airflow.py",
    "tests/integration/test_store_operations.py",
    "tests/integration/test_sqs_queues.py",
    "tests/integration/test_store_history.py",
    "tests/integration/test_store_sessions.py",
    "tests/integration/test_store_restore.py",
    "tests/integration/test_store_model.py",
)


def scope_of(nodeid: str) -> str:
    """Return the group of a test, or its file."""
    file = nodeid.partition("::")[0]
    # the longest name says most: a file of a folder may be a group of its own
    fitting = [(len(name), group) for group, names in GROUPS.items() for name in names if file.startswith(name)]
    return max(fitting)[1] if fitting else file


def order(items: list[pytest.Item]) -> None:
    """Sort tests: the groups and the long files as they are listed, then the files with the most tests."""
    first, tests = [*GROUPS, *LONG_FILES], Counter(scope_of(item.nodeid) for item in items)

    def rank(item: pytest.Item) -> tuple[int, int]:
        scope = scope_of(item.nodeid)
        return first.index(scope) if scope in first else len(first), -tests[scope]

    items.sort(key=rank)


class Scopes(LoadScopeScheduling):
    """Gives each process a group or a file at a time; in the order of the tests with --no-loadscope-reorder."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)
