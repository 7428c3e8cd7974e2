"""Where a library of an extra is not installed, each way to it says which extra to install."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowFailException
from airflow.sdk.providers_manager_runtime import ProvidersManagerTaskRuntime

from airflow_delayed.delivery import delivery_for
from airflow_delayed.errors import MissingExtra
from airflow_delayed.message import DelayedMessage, utcnow
from airflow_delayed.sources.query import SqlSource

CONNECTIONS = {"broker": "rabbitmq://localhost", "cloud": "aws://", "database": "mysql://localhost"}
RABBITMQ = "RabbitMQ cannot be used without pika: pip install 'airflow-provider-delayed[rabbitmq]'"
SQS = "Amazon SQS cannot be used without apache-airflow-providers-amazon: pip install 'airflow-provider-delayed[sqs]'"
SPARK = (
    "DelayedSparkSendOperator cannot be used without apache-airflow-providers-apache-spark: pip install"
    " 'airflow-provider-delayed[spark]'"
)
SQL = (
    "connection 'database': type 'mysql' cannot be used without its provider: pip install"
    " 'airflow-provider-delayed[mysql]'"
)


#: What is asked of a Python that has none of these modules: one start for all.
HIDDEN = (
    "pika",
    "airflow.providers.amazon.aws.hooks.sqs",
    "airflow.providers.apache.spark.operators.spark_submit",
    "airflow.providers.mysql.hooks.mysql",
)
QUESTIONS = {
    "rabbitmq": (
        "delivery('broker').verify(['orders'])",
        "delivery('broker').send([])",
        "delivery('broker').test_connection()",
        "command('doctor', '--conn-id', 'broker')",
        "command('redrive', '--conn-id', 'broker', '--dry-run')",
        "delivery('broker').horizon.days",
    ),
    "sqs": (
        "delivery('cloud')",
        "import_module('airflow_delayed.sensors.fifo_cycle').FifoCycleSensor(task_id='t', conn_id='cloud',"
        " destination='d').execute({})",
        "command('doctor', '--conn-id', 'cloud')",
        "command('install', '--conn-id', 'cloud')",
    ),
    "spark": ("import_module('airflow_delayed.operators.spark')",),
    "database": (
        "command('list', '--store-conn-id', 'database')",
        "command('doctor', '--conn-id', 'database')",
    ),
}


@pytest.fixture(scope="module")
def answers() -> dict[str, list[Any]]:
    """The answers by the subject of their questions: values, and the texts of errors."""
    code = f"""
import contextlib, io, json, sys
sys.modules.update(dict.fromkeys({HIDDEN}))
from importlib import import_module

def command(*words):
    from airflow.cli import cli_parser
    arguments = cli_parser.get_parser().parse_args(["delayed", *words])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            arguments.func(arguments)
        except SystemExit as end:
            printed.write(str(end))
    return printed.getvalue()

def delivery(conn_id):
    from airflow_delayed.delivery import delivery_for
    return delivery_for(conn_id)

def answer(question):
    try:
        return eval(question)
    except Exception as error:
        return f"{{type(error).__name__}}: {{error}}"

found = {{subject: [answer(one) for one in asked] for subject, asked in {QUESTIONS}.items()}}
print("the answers: " + json.dumps(found))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **{f"AIRFLOW_CONN_{name.upper()}": uri for name, uri in CONNECTIONS.items()}},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("the answers: "))
    found: dict[str, list[Any]] = json.loads(line.removeprefix("the answers: "))
    return found


def test_rabbitmq(answers: dict[str, list[Any]]) -> None:
    verify, send, tested, doctor, redrive, horizon = answers["rabbitmq"]
    assert verify == send == f"MissingExtra: {RABBITMQ}"
    # what Airflow's UI shows
    assert tested == [False, RABBITMQ]
    assert redrive == RABBITMQ
    assert RABBITMQ in doctor
    # what needs no network works: a notifier checks its message by it
    assert horizon == 3106


def test_amazon_sqs(answers: dict[str, list[Any]]) -> None:
    made, cycled, doctor, installed = answers["sqs"]
    assert made == f"MissingExtra: {SQS}"
    assert SQS in cycled
    assert SQS in doctor
    assert installed == SQS


def test_spark(answers: dict[str, list[Any]]) -> None:
    assert answers["spark"] == [f"MissingExtra: {SPARK}"]


@pytest.fixture
def no_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ProvidersManagerTaskRuntime().hooks, "mysql", None)


def test_a_database(answers: dict[str, list[Any]], connect: Callable[..., str], no_provider: None) -> None:
    connect("database", CONNECTIONS["database"])
    with pytest.raises(Exception, match="Unknown hook type"):
        BaseHook.get_connection("database").get_hook()
    store = delivery_for("database")
    for call in (lambda: store.verify([]), lambda: store.send([message()])):
        with pytest.raises(MissingExtra) as found:
            call()
        assert str(found.value) == SQL
    listed, examined = answers["database"]
    assert listed == SQL
    # its name once
    assert f" {SQL}" in examined
    assert f": {SQL}" not in examined


def test_a_database_as_a_source(connect: Callable[..., str], no_provider: None, run) -> None:
    connect("database", CONNECTIONS["database"])
    with pytest.raises(AirflowFailException) as found:
        run.execute(source=SqlSource("SELECT 1", "database"), delay=1)
    assert str(found.value) == f"{SQL}, or name another connection"


def test_a_source_whose_provider_no_extra_brings(connect: Callable[..., str], run) -> None:
    connect("database", "mssql://localhost")
    with pytest.raises(AirflowFailException) as found:
        run.execute(source=SqlSource("SELECT 1", "database"), delay=1)
    assert str(found.value) == (
        "connection 'database' of SqlSource is of type 'mssql', which no installed provider knows; name one of a"
        " database, or install its provider"
    )


def message() -> DelayedMessage:
    return DelayedMessage(destination="d", body=b"", due_at=utcnow(), message_id="m", headers={})
