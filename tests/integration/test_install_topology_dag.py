"""dags/install_topology.py, run by Airflow on a real RabbitMQ, an SQS and a SQLite file."""

from __future__ import annotations

from pathlib import Path
from secrets import token_hex

from support.examples import dags_of, result
from support.rabbitmq import virtual_host

from services import sqs


def test_a_dry_run_makes_nothing_and_a_run_all_of_it(
    here: Path, tmp_path: Path, rabbitmq_url: str, sqs_endpoint: str, connect, run_dag, monkeypatch
):
    dag = dags_of(here / "dags/install_topology.py", monkeypatch)["install_topology"]
    connect("delayed_sqs", **sqs.connection(sqs_endpoint, queue_name_prefix=f"{token_hex(4)}-"))
    connect("delayed_store", conn_type="sqlite", host=str(tmp_path / "store.db"))
    with virtual_host(rabbitmq_url) as broker:
        connect("delayed_rabbitmq", **broker.connection)

        def run(**conf) -> dict[str, dict[str, int]]:
            done = run_dag(dag, run_conf=conf)
            return {task_id: result(done, task_id) for task_id in ("rabbitmq", "sqs", "store")}

        planned = run()
        assert {name: set(counts) for name, counts in planned.items()} == {name: {"would create"} for name in planned}
        made = run(dry_run=False)
        assert made == {name: {"created": counts["would create"]} for name, counts in planned.items()}
        assert planned.keys() == dag.task_dict.keys()
        assert {name: set(counts) for name, counts in run(dry_run=True).items()} == {name: {"ok"} for name in planned}
