"""The pages of docs/sqs are run as they stand: their Python, and their commands by a stand-in for the AWS CLI."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import fields
from datetime import timedelta
from pathlib import Path

import pytest
from support import aws_cli, pages
from support.examples import note_dags
from support.sqs import World

from airflow_delayed.hooks.sqs import SqsDelayHook
from airflow_delayed.sensors.fifo_cycle import FifoCycleSensor
from airflow_delayed.sqs import client
from airflow_delayed.sqs.settings import QueueSettings
from airflow_delayed.sqs.stats import CycleCounts
from services import sqs

pytestmark = pytest.mark.long

PAGES = ("README", "long-delays", "queues", "nservicebus", "idempotent-consumers", "life")


@pytest.fixture
def docs(here: Path) -> Path:
    return here / "docs/sqs"


@pytest.fixture
def world(clocked_server: sqs.Sqs, connect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[World]:
    """What the pages expect: a connection, credentials for boto3, and a working folder; there are no queues yet.

    The server is this process's own: the pages' queues are not named after a test, and another process may play them.
    """
    server = clocked_server
    for name, value in {**sqs.CLIENT_ENV, "AWS_ENDPOINT_URL": server.url}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    conn_id = connect("aws_default", **sqs.connection(server.url, unrestricted_delay=True))
    made = World(server.url, conn_id, destination="reminders")
    yield made
    delete_queues(made)


def delete_queues(world: World) -> None:
    for url in world.client.list_queues(QueueNamePrefix="reminders").get("QueueUrls", ()):
        world.client.delete_queue(QueueUrl=url)


def quickly(block: str) -> str:
    """Let a consumer wait for a second, and take all that is there at once."""
    return block.replace("WaitTimeSeconds=20", "WaitTimeSeconds=1, MaxNumberOfMessages=10")


def table(*rows: tuple[str, ...]) -> str:
    head, *others = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *others)) + "\n"


def test_the_connection_of_the_index_is_one(docs: Path, monkeypatch: pytest.MonkeyPatch):
    (line,) = (line for line in (docs / "README.md").read_text().splitlines() if "AIRFLOW_CONN_AWS_DEFAULT" in line)
    name, value = shlex.split(line)[1].split("=", 1)
    monkeypatch.setenv(name, value)
    assert SqsDelayHook("aws_default").unrestricted_delay


def test_long_delays(docs: Path, world: World, run_dag, monkeypatch: pytest.MonkeyPatch):
    made = note_dags(monkeypatch)
    list(pages.run(docs / "long-delays.md"))
    remind, cycle = made
    assert run_dag(remind).state == "success"
    assert (world.counts("reminders"), world.counts("reminders-delay.fifo")) == ((0, 0, 0), (0, 1, 0))
    (sensor,) = cycle.tasks
    assert isinstance(sensor, FifoCycleSensor)
    sensor.until = timedelta(0)
    assert run_dag(cycle).state == "success"


def test_the_sensors_parameters_and_summary_are_told(docs: Path):
    text = (docs / "long-delays.md").read_text()
    sensor = FifoCycleSensor(task_id="cycle", destination="reminders")
    for name in ("until", "wait_time_seconds", "empty_looks"):
        (line,) = (line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        assert json.dumps(getattr(sensor, name)) in line.rsplit("|", 2)[1]
    for key in CycleCounts().summary():
        assert f"`{key}`" in text


def run_commands(docs: Path, tmp_path: Path) -> None:
    script = "\n".join(text for language, text in pages.blocks(docs / "queues.md") if language == "bash")
    (tmp_path / "bin").mkdir()
    with aws_cli.program(tmp_path / "bin"):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            env={**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr


def test_queues_made_by_hand_are_as_demanded(docs: Path, world: World, tmp_path: Path):
    run_commands(docs, tmp_path)
    made = QueueSettings(retention=345_600, dead_letter_queue="reminders-dead", max_receive_count=5)
    assert world.hook.verify(["reminders"], settings=made).counts() == {"ok": 3}
    by_hand = [attributes_of(world, name) for name in ("reminders", "reminders-delay.fifo", "reminders-dead")]
    list(pages.run(docs / "queues.md"))
    # and the same as those that install makes
    delete_queues(world)
    world.hook.install(["reminders"], create_destinations=True, settings=made)
    assert by_hand == [attributes_of(world, name) for name in ("reminders", "reminders-delay.fifo", "reminders-dead")]


def attributes_of(world: World, name: str) -> dict[str, str]:
    url = world.url_of(name)
    found = world.client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    policy = {key: str(value) for key, value in json.loads(found.pop("RedrivePolicy", "{}")).items()}
    left = {key: value for key, value in found.items() if not key.endswith("Timestamp")}
    return {**left, **policy}


def test_every_setting_is_told(docs: Path):
    text = (docs / "queues.md").read_text()
    for setting in fields(QueueSettings):
        assert f"`{setting.name}`" in text


def test_every_iam_action_is_told(docs: Path):
    text = (docs / "queues.md").read_text()
    rows = [("method", "on the", "actions", "when")]
    for need in client.NEEDS:
        queue = need.queue if need.queue != "*" else "whole account"
        actions = ", ".join(f"`{action}`" for action in need.actions)
        rows.append((f"`{need.method}`", queue, actions, need.when or "always"))
    assert table(*rows) in text
    assert "`kms:GenerateDataKey` and `kms:Decrypt` on the key, and a receiver `kms:Decrypt`" in text
    assert (client.KMS_SEND, client.KMS_RECEIVE) == (("kms:GenerateDataKey", "kms:Decrypt"), ("kms:Decrypt",))


def test_nservicebus(docs: Path, world: World):
    world.install()

    def due_now(block: str) -> str:
        assert "hours=1" in block or "receive_message" in block
        return quickly(block).replace("hours=1", "hours=0")

    assert len(list(pages.run(docs / "nservicebus.md", due_now))) == 2
    assert world.ids() == []


def test_life(docs: Path, world: World):
    settings = QueueSettings(dead_letter_queue="reminders-dead", max_receive_count=1)
    world.hook.install(["reminders"], create_destinations=True, settings=settings)
    world.hook.send([world.message(0, "dead")])
    url = world.url_of("reminders")
    for _ in range(2):
        world.client.receive_message(QueueUrl=url, VisibilityTimeout=0)
    world.hook.send([world.message(0, "near"), world.message(600, "delayed"), world.message(1000, "far")])
    assert len(list(pages.run(docs / "life.md", quickly))) == 3
    # what was given back has been received once, and goes the way of dead letters
    assert world.ids() == ["dead"]
