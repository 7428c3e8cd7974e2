"""What Airflow lets this package do with each DAG that it parses, by the entry point group ``airflow.policy``.

Each process of Airflow imports this module early, so at its top it imports nothing else of the package.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from airflow.policies import hookimpl

if TYPE_CHECKING:
    from airflow.sdk import DAG


@hookimpl
def dag_policy(dag: DAG) -> None:
    """Check the notifiers of a DAG, and keep them where the listener is on.

    :raises AirflowClusterPolicyViolation: a notifier cannot do its work for this DAG; that is an import error.
    """
    from airflow_delayed import config

    listens = config.listener()
    if listens:
        from airflow_delayed.notifications.listener import stop_listening

        # a process that parses DAGs is neither a scheduler nor an API server
        stop_listening()
    # otherwise no file of DAGs has imported a notifier
    if "airflow_delayed.notifications.notifiers" in sys.modules:
        from airflow_delayed.notifications.dag_notifiers import check_and_keep

        check_and_keep(dag, keep=listens)
