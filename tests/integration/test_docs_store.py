"""The pages of docs/store are run as they stand."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from configparser import ConfigParser
from datetime import timedelta
from pathlib import Path

import pytest
import yaml
from airflow.cli import cli_parser
from support import pages
from support.examples import note_dags
from support.sqs import World

from airflow_delayed.cli import service
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.operators.dispatch import HERE
from airflow_delayed.store.dispatch.dispatcher import CLAIMED_AHEAD
from airflow_delayed.store.dispatch.loop import POLL
from airflow_delayed.store.policy import BREAKER_TIME, MAX_QUEUE_NAME, DispatchPolicy
from airflow_delayed.triggers.store_dispatch import StoreDispatchTrigger
from services import sqs

PAGES = ("README", "dispatchers", "pause", "rights")


@pytest.fixture
def docs(here: Path) -> Path:
    return here / "docs/store"


@pytest.fixture
def store(connect, tmp_path: Path) -> Iterator[DelayedStoreHook]:
    connect("reminders_db", conn_type="sqlite", host=str(tmp_path / "reminders.db"))
    made = DelayedStoreHook("reminders_db")
    yield made
    made.close()


def test_the_index(docs: Path, store: DelayedStoreHook):
    assert len(list(pages.run(docs / "README.md"))) == 3
    assert store.count() == 0
    text = " ".join((docs / "README.md").read_text().split())
    assert f"as a queue table {MAX_QUEUE_NAME} bytes" in text
    policy = DispatchPolicy()
    assert f"{policy.remember.days} days: `remember=`" in text
    assert f"claimed for {policy.claim_timeout.seconds} seconds" in text


def test_run_dispatchers(docs: Path, store: DelayedStoreHook, sqs_endpoint: str, connect, run_dag, monkeypatch):
    made = note_dags(monkeypatch)
    connect("aws_default", **sqs.connection(sqs_endpoint))
    world = World(sqs_endpoint, "aws_default").install()
    store.install(["q"], create_destinations=True)
    list(pages.run(docs / "dispatchers.md"))
    every, stay = made
    now = store.now()
    DelayedStoreHook("reminders_db", "aws_default").send([world.message(600, "a"), world.message(1000, "b")])
    assert run_dag(every).state == "success"
    assert [one.message_id for one in store.list()] == ["b"]

    # in the triggerer, for a moment
    (task,) = stay.tasks
    assert (task.until, task.deferrable) == (timedelta(hours=6), True)
    task.until = timedelta(seconds=4)
    from support.stores import message

    store.send([message("c", now), message("d", store.now() + timedelta(seconds=1.5))])
    run = run_dag(stay)
    assert run.state == "success"
    (instance,) = run.get_task_instances()
    assert instance.xcom_pull(task_ids="stay")["dispatched"] == 2


def test_the_figures_and_names_are_told(docs: Path):
    text = " ".join((docs / "dispatchers.md").read_text().split())
    policy = DispatchPolicy()
    assert f"`give_up_after` ({BREAKER_TIME.seconds} s)" in text
    assert f"`number_of_retries` times ({policy.number_of_retries})" in text
    assert policy.maximum_recovery_failures_per_second == 1  # "more often than once a second"
    assert f"up to {CLAIMED_AHEAD.total_seconds():g} s before" in text
    assert f"within {StoreDispatchTrigger.grace:g} seconds" in text
    assert (HERE, POLL) == (30, 1)  # "half a minute at most", "looks every second"


def test_the_service_of_the_page(docs: Path):
    found = pages.blocks(docs / "dispatchers.md")
    blocks = dict(found)
    (command,) = (text for language, text in found if language == "sh")
    deployment = yaml.safe_load(blocks["yaml"])
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    args = parsed(container["command"])
    assert (args.store_conn_id, args.deliver_conn_ids, args.host) == ("reminders_db", ["aws_default"], "0.0.0.0")
    assert [port["containerPort"] for port in container["ports"]] == [args.port]
    assert deployment["spec"]["selector"]["matchLabels"] == deployment["spec"]["template"]["metadata"]["labels"]
    probes = [container[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert probes == ["/live", "/live", "/ready"]

    unit = ConfigParser(delimiters="=")
    unit.optionxform = str
    unit.read_string(blocks["ini"])
    assert parsed(unit["Service"]["ExecStart"].split()).port == args.port
    for seconds in (pod["terminationGracePeriodSeconds"], int(unit["Service"]["TimeoutStopSec"])):
        assert seconds > 2 * service.GRACE
    text = " ".join((docs / "dispatchers.md").read_text().split())
    assert f"at `http://{parsed(command.split()).host}:{args.port}`" in text
    assert f"longer than {service.GRACE:g} seconds" in text
    assert f"answered within {service.REACHABLE:g} seconds" in text
    assert f"claimed within {service.CLAIMED:g} seconds" in text


def parsed(command: list[str]) -> Namespace:
    program, *words = command
    assert Path(program).name == "airflow"
    return cli_parser.get_parser().parse_args(words)


def test_the_lines_of_the_log_are_those_that_are_logged(docs: Path, here: Path):
    code = " ".join(
        " ".join(path.read_text().replace('"\n', "").split()) for path in (here / "airflow_delayed").rglob("*.py")
    )
    table = (docs / "dispatchers.md").read_text().partition("## What the log says")[2]
    lines = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    assert len(lines) == 15
    for line in lines:
        words = line.replace("'x'", "%r").replace("connection %r cannot", "cannot")
        assert words.removeprefix("messages ") in code.replace("{conn_id!r}", "%r"), line
