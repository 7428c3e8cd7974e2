"""Run by the oldest Airflow that is served, see tests/integration/test_oldest_airflow.py; prints what it finds as JSON.

A script: `python oldest.py <repository> <result.json> <question> ...`, with AIRFLOW_HOME and the connections in the
environment. The questions are "what is there" and "how DAGs run".
"""

from __future__ import annotations

import json
import os
import pkgutil
import runpy
import sys
from contextlib import closing
from datetime import timedelta
from importlib import import_module
from pathlib import Path


def problems(things, use) -> dict[str, str]:
    """Use each thing, and return by its name what went wrong."""
    found = {}
    for name, thing in things.items():
        try:
            use(thing)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def run(dag):
    """Run a DAG, and return the tasks' states, and their results."""
    from airflow.dag_processing.bundles.manager import DagBundlesManager
    from airflow.models.dagbag import DagBag, sync_bag_to_db

    bag = DagBag(os.devnull)
    bag.bag_dag(dag)
    DagBundlesManager().sync_bundles_to_db()
    sync_bag_to_db(bag, "dags-folder", None)
    instances = dag.test().get_task_instances()
    results = {one.task_id: one.xcom_pull(task_ids=one.task_id) for one in instances}
    return {one.task_id: one.state for one in instances}, results


def way(conn_id: str, store: str | None, **arguments):
    """Return a DAG that installs, sends three messages, two of them through the store, and dispatches one of those.

    Into SQS that goes 15 minutes ahead; into a queue table when the message is due.
    """
    from airflow.sdk import DAG

    from airflow_delayed.operators.dispatch import StoreDispatchOperator
    from airflow_delayed.operators.send import DelayedSendOperator
    from airflow_delayed.operators.topology import TopologyInstallOperator

    with DAG(f"by_{conn_id}", schedule=None) as dag:
        installs = [
            TopologyInstallOperator(
                task_id=f"install_{name}",
                conn_id=name,
                destinations=["mail"] if name == conn_id else [],
                create_destinations=name == conn_id,
            )
            for name in {conn_id, store or conn_id}
        ]
        send = DelayedSendOperator(
            task_id="send",
            conn_id=conn_id,
            store_conn_id=store,
            destination="mail",
            messages=[{"value": str(delay), "delay_seconds": delay} for delay in (0, 60 if store else 2, 9000)],
            hold_over=timedelta(0),
        )
        dispatch = StoreDispatchOperator(
            task_id="dispatch", store_conn_id=store or conn_id, deliver_conn_ids=[conn_id], **arguments
        )
        installs >> send >> dispatch
    return dag


def again():
    """Return a DAG whose tasks send, and die before they can say so; and then are tried again."""
    from airflow.sdk import DAG

    from airflow_delayed.operators.send import DelayedSendOperator

    class DiesFirst(DelayedSendOperator):
        def execute(self, context):
            summary = super().execute(context)
            if context["ti"].try_number == 1:
                raise RuntimeError("the worker was killed")
            return summary

    with DAG("again", schedule=None) as dag:
        for name, due in {"relative": {"delay": 9000}, "absolute": {"due_at": "2999-01-01T00:00:00Z"}}.items():
            DiesFirst(
                task_id=name,
                conn_id="db",
                destination="mail",
                value=name,
                retries=1,
                retry_delay=timedelta(0),
                **due,
            )
    return dag


def what_is_there(root: Path) -> dict[str, object]:
    """Import each module, read each DAG, and run one."""
    import airflow
    from airflow.providers_manager import ProvidersManager

    import airflow_delayed

    modules = [one.name for one in pkgutil.walk_packages(airflow_delayed.__path__, "airflow_delayed.")]
    dags = sorted((root / "dags").glob("*.py"))
    return {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "airflow": airflow.__version__,
        "modules": problems({name: name for name in modules}, import_module),
        "dags": problems({path.stem: path for path in dags}, runpy.run_path),
        "into a queue table": run(way("db", None, until=timedelta(seconds=3))),
        "left in db": left_in("db"),
        "rendered": context_of_the_fixture(),
        "type": ProvidersManager().hooks["rabbitmq"].hook_class_name,
    }


def how_dags_run(root: Path) -> dict[str, object]:
    """Run a DAG with SQS and a trigger, and one whose tasks are tried again."""
    return {
        "into SQS, in the triggerer": run(way("sqs", "db2", until=timedelta(seconds=3), deferrable=True)),
        "left in db2": left_in("db2"),
        "into a queue table": run(way("db", None, until=timedelta(seconds=3)))[0],
        "left in db before that": left_in("db"),
        "again": run(again()),
        "left in db after that": left_in("db"),
    }


def context_of_the_fixture() -> str:
    """Render templates by ``delayed.run`` of the fixture; the oldest environment lacks pytest."""
    from datetime import datetime, timezone

    from airflow.sdk import DAG, BaseOperator
    from airflow.timetables.interval import CronDataIntervalTimetable

    from airflow_delayed.testing.delayed import Delayed

    class Render(BaseOperator):
        template_fields = ("text",)
        text = (
            "{{ ts_nodash }} {{ data_interval_start.add(hours=1) }} {{ macros.ds_add(ds, 1) }} {{ params.shop }}"
            " {{ var.value.get('none', 'default') }} {{ run_id }} {{ ti.task_id }}"
        )

        def execute(self, context) -> str:
            return self.text

    with DAG("rendered", schedule=CronDataIntervalTimetable("@daily", "UTC"), params={"shop": 1}):
        task = Render(task_id="render")
    delayed = Delayed(None)
    delayed.move_to(datetime(2026, 6, 5, 7, 30, tzinfo=timezone.utc))
    return delayed.run(task)


def left_in(conn_id: str) -> int:
    from airflow_delayed.hooks.store import DelayedStoreHook

    with closing(DelayedStoreHook(conn_id)) as store:
        return len(list(store.list()))


QUESTIONS = {"what is there": what_is_there, "how DAGs run": how_dags_run}


def main(root: Path, result: Path, *questions: str) -> None:
    from airflow.utils.db import initdb

    initdb()
    result.write_text(json.dumps({name: QUESTIONS[name](root) for name in questions}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
