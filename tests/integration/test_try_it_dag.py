"""dags/try_it.py, run by Airflow on a real RabbitMQ, an SQS and a SQLite file."""

from __future__ import annotations

from pathlib import Path
from secrets import token_hex

import pytest
from support.examples import dags_of, result
from support.rabbitmq import VirtualHost

from services import sqs


@pytest.mark.parametrize("name", ["sqs", "rabbitmq", "store"])
def test_the_message_arrives_when_it_is_due_and_not_earlier(
    here: Path, tmp_path: Path, empty_vhost: VirtualHost, sqs_endpoint: str, connect, run_dag, monkeypatch, name: str
):
    dag = dags_of(here / "dags/try_it.py", monkeypatch)[f"try_it_{name}"]
    connect("delayed_sqs", **sqs.connection(sqs_endpoint))
    connect("delayed_store", conn_type="sqlite", host=str(tmp_path / "store.db"))
    connect("delayed_rabbitmq", **empty_vhost.connection)
    done = run_dag(dag, run_conf={"queue": f"try_{token_hex(4)}"})
    assert 0 <= result(done, "compare") < 60
