"""The example DAGs of dags/sqs_long_delays.py, run by Airflow; SQS's clock is moved, Airflow's is not."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from airflow.sdk import DAG
from support.sqs import ClockedWorld

from services import sqs


@pytest.fixture
def world(connect) -> Iterator[ClockedWorld]:
    # a server of its own: nothing has moved its clock yet, and the sender goes by this machine's
    with sqs.running() as server:
        conn_id = connect("delayed_sqs", **sqs.connection(server.url, unrestricted_delay=True))
        yield ClockedWorld(server.url, conn_id, now=server.now, server=server, destination="long-delays")


@pytest.fixture
def dags(here) -> dict[str, DAG]:
    found = runpy.run_path(str(here / "dags/sqs_long_delays.py"))
    return {found[name].dag.dag_id: found[name].dag for name in ("install", "cycle")}


def cycled(dags: dict[str, DAG], run_dag) -> dict[str, Any]:
    """Run the cycle for a second, and return its summary."""
    dags["sqs_long_delays_cycle"].get_task("cycle").until = timedelta(seconds=1)
    run = run_dag(dags["sqs_long_delays_cycle"])
    assert run.state == "success"
    (instance,) = run.get_task_instances()
    summary: dict[str, Any] = instance.xcom_pull(task_ids="cycle")
    return summary


def test_both_messages_arrive_at_their_time(world: ClockedWorld, dags: dict[str, DAG], run_dag):
    run = run_dag(dags["sqs_long_delays"])
    assert run.state == "success"
    sent = run.get_task_instances()[0].xcom_pull(task_ids="send")
    # the task that sent began some time after its DAG
    began = datetime.fromisoformat(sent["first_due"]) - timedelta(minutes=14, seconds=5)
    assert (world.counts(world.queue), world.counts(world.fifo)) == ((0, 1, 0), (0, 1, 0))

    def at(seconds: float) -> list[str]:
        """Return what has arrived so many seconds after the start that the delays count from."""
        world.advance(seconds - (world.now() - began).total_seconds())
        return sorted(arrived.body.decode() for arrived in world.arrived())

    assert at(830) == []
    assert at(930) == ["in 14 minutes and 5 seconds"]
    first = cycled(dags, run_dag)
    assert (first["requeued"], first["delivered"]) == (1, 0)
    assert at(1870) == []
    second = cycled(dags, run_dag)
    assert (second["requeued"], second["delivered"]) == (0, 1)
    assert second["late_max"] <= 2
    assert at(1910) == []
    assert at(1960) == ["in 32 minutes and 5 seconds"]
    assert world.counts(world.fifo) == (0, 0, 0)


def test_the_cycle_runs_without_end_one_run_at_a_time(dags: dict[str, DAG]):
    dag = dags["sqs_long_delays_cycle"]
    assert (dag.schedule, dag.max_active_runs) == ("@continuous", 1)
    assert dag.get_task("cycle").deferrable
