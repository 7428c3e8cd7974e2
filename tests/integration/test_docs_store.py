"""The pages of docs/store are run as they stand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from datetime import timedelta
from pathlib import Path

import pytest
from airflow.sdk import DAG
from support import pages
from support.sqs import World

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.operators.dispatch import HERE
from airflow_delayed.store.policy import DispatchPolicy
from airflow_delayed.store.schema import MAX_QUEUE_NAME
from airflow_delayed.store.stay import AHEAD
from airflow_delayed.store.waiting import POLL
from airflow_delayed.triggers.store_dispatch import GRACE
from services import sqs

PAGES = ("README", "dispatchers")


@pytest.fixture
def docs(here: Path) -> Path:
    return here / "docs/store"


@pytest.fixture
def store(connect, tmp_path: Path) -> Iterator[DelayedStoreHook]:
    connect("reminders_db", conn_type="sqlite", host=str(tmp_path / "reminders.db"))
    made = DelayedStoreHook("reminders_db")
    yield made
    made.close()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(docs: Path, page: str):
    for link in pages.links(docs / f"{page}.md"):
        assert (docs / link).resolve().exists(), link


def test_the_index(docs: Path, store: DelayedStoreHook):
    assert len(list(pages.run(docs / "README.md"))) == 3
    assert store.count() == 0
    text = (docs / "README.md").read_text()
    assert f"as a queue table {MAX_QUEUE_NAME} bytes" in text
    policy = DispatchPolicy()
    assert f"for {policy.remember.days} days" in text
    assert f"claimed for {policy.claim_timeout.seconds} seconds" in text


def test_run_dispatchers(docs: Path, store: DelayedStoreHook, sqs_endpoint: str, connect, run_dag, monkeypatch):
    made: list[DAG] = []

    class Noted(DAG):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr("airflow.sdk.DAG", Noted)
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
    task.until = timedelta(seconds=2)
    from support.stores import message

    store.send([message("c", now), message("d", store.now() + timedelta(seconds=1.5))])
    run = run_dag(stay)
    assert run.state == "success"
    (instance,) = run.get_task_instances()
    assert instance.xcom_pull(task_ids="stay")["dispatched"] == 2


def test_the_figures_and_names_are_told(docs: Path):
    text = (docs / "dispatchers.md").read_text()
    policy = DispatchPolicy()
    for one in fields(DispatchPolicy):
        if one.name.startswith("time_to_trigger"):
            assert f"`{one.name}` ({getattr(policy, one.name).seconds} s)" in text
    assert f"`number_of_retries` times ({policy.number_of_retries})" in text
    assert f"`maximum_recovery_failures_per_second` ({policy.maximum_recovery_failures_per_second})" in text
    assert f"up to {AHEAD.total_seconds():g} s before" in text
    assert f"within {GRACE:g} seconds" in text
    assert (HERE, POLL) == (30, 1)  # "half a minute at most", "looks every second"


def test_the_lines_of_the_log_are_those_that_are_logged(docs: Path, here: Path):
    code = " ".join(
        " ".join(path.read_text().replace('"\n', "").split()) for path in (here / "airflow_delayed").rglob("*.py")
    )
    table = (docs / "dispatchers.md").read_text().partition("## What the log says")[2]
    lines = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    assert len(lines) == 11
    for line in lines:
        words = line.replace("'x'", "%r").replace("connection %r cannot", "cannot").replace("messages handed", "handed")
        assert words.removeprefix("messages ") in code.replace("{conn_id!r}", "%r"), line
