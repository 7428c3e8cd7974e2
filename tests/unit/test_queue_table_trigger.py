from __future__ import annotations

import asyncio

import pytest
from airflow.models.trigger import Trigger
from support.watching import number

from airflow_delayed.errors import LimitExceeded
from airflow_delayed.triggers.queue_table import QueueTableTrigger

PATH = "airflow_delayed.triggers.queue_table.QueueTableTrigger"
ARGUMENTS = {
    "conn_id": "c",
    "queue": "q",
    "batch_size": 7,
    "pause": 2.5,
    "body": True,
    "body_limit": 9,
    "schema": "s",
}


def test_arguments_are_stored_and_read_back():
    stored = QueueTableTrigger(**Trigger._decrypt_kwargs(Trigger.encrypt_kwargs(ARGUMENTS)))
    assert stored.serialize() == (PATH, ARGUMENTS)
    plain = QueueTableTrigger("c", "q")
    # so that a watcher is the same one when there are more arguments
    assert plain.serialize() == (PATH, {"conn_id": "c", "queue": "q"})


def test_airflow_takes_watchers_given_alike_for_one():
    assert number(QueueTableTrigger("c", "q")) == number(QueueTableTrigger("c", "q", batch_size=1000))
    assert number(QueueTableTrigger("c", "q")) != number(QueueTableTrigger("c", "q", body=True))


def test_a_stream_is_of_one_table_and_one_way_to_read_it():
    arguments = [{}, {"queue": "r"}, {"conn_id": "d"}, {"schema": "s"}, {"body": True}, {"pause": 1}]
    keys = [QueueTableTrigger(**{"conn_id": "c", "queue": "q", **each}).shared_stream_key() for each in arguments]
    assert len(set(keys)) == len(keys)
    assert QueueTableTrigger("c", "q", 1000).shared_stream_key() == keys[0]


@pytest.mark.parametrize(
    "arguments, problem",
    [
        ({"conn_id": ""}, "conn_id and queue must not be empty"),
        ({"queue": ""}, "conn_id and queue must not be empty"),
        ({"batch_size": 0}, "batch_size=0 must be 1 to 10000"),
        ({"batch_size": 10_001}, "batch_size=10001 must be 1 to 10000"),
        ({"pause": -1}, "pause=-1 must be 0 to 60 seconds"),
        ({"body_limit": 1_048_577}, "body_limit=1048577 must be 0 to 1048576 bytes"),
        ({"triggerer_queue": "near"}, r"triggerer_queue= needs Airflow 3\.4"),
    ],
)
def test_a_wrong_argument_is_named_when_the_dag_is_parsed(arguments, problem, monkeypatch):
    monkeypatch.setattr("airflow_delayed.compat.TRIGGERER_QUEUES", False)
    with pytest.raises(ValueError, match=problem):
        QueueTableTrigger(**{"conn_id": "c", "queue": "q", **arguments})


def test_a_name_that_no_table_can_have():
    with pytest.raises(LimitExceeded, match="has 64 bytes; the name of a table has up to 63"):
        QueueTableTrigger("c", "q" * 64)


def test_a_task_cannot_be_deferred_to_it():
    async def run() -> None:
        async for _ in QueueTableTrigger("c", "q").run():
            pass

    with pytest.raises(NotImplementedError, match="QueueTableTrigger is for an AssetWatcher"):
        asyncio.run(run())
