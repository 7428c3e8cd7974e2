"""Runs of DelayedSendOperator without Airflow: a task instance that is tried again, its state, its log and its rows."""

from __future__ import annotations

from datetime import datetime
from types import SimpleNamespace

import pytest

from airflow_delayed.message import UTC
from airflow_delayed.operators.send import DelayedSendOperator
from support.recorder import Recorder
from support.times import by_clock

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def deliver_by(monkeypatch, delivery, store):
    """Have operators deliver and store by these, each a function of a connection's name and options."""
    monkeypatch.setattr("airflow_delayed.operators.send_arguments.delivery_for", delivery)
    monkeypatch.setattr("airflow_delayed.operators.send_arguments.store_for", store)


class States(dict):
    """A task state store: survives retries."""

    def set(self, key, value, retention=None):
        self[key] = value

    def delete(self, key):
        self.pop(key, None)


class Run:
    """One task instance that may be tried again; its clock is moved by hand."""

    def __init__(self, monkeypatch):
        self.now = NOW
        self.transport = Recorder()
        self.store = Recorder("store", destinations=())
        self.states = States()
        self.run_id = "run-1"
        self.max_tries = 0
        self.map_index = -1
        self.try_number = 0
        self.xcoms = {}
        self.options = None
        deliver_by(monkeypatch, self.delivery, self.holding)
        # as in Airflow 3.3; a test of what a later one does turns it on
        monkeypatch.setattr("airflow_delayed.compat.CLEAR_DELETES_STATE", False)

    def holding(self, conn_id, deliver_conn_id, **options):
        self.options = options
        return self.store

    def delivery(self, conn_id, **options):
        self.options = options
        return self.transport

    def clear(self):
        """Do what Airflow does with a task that is cleared after its first try."""
        self.max_tries += 1

    def task(self, **arguments):
        arguments = {"conn_id": "recorder", "destination": "mail", **arguments}
        task = DelayedSendOperator(task_id="send", **arguments)
        return by_clock(task, lambda: self.now)

    @property
    def context(self):
        ti = SimpleNamespace(
            dag_id="dag",
            run_id=self.run_id,
            task_id="send",
            map_index=self.map_index,
            max_tries=self.max_tries,
            try_number=self.try_number,
            task=None,
            xcom_push=lambda key, value: self.xcoms.update({key: value}),
        )
        dag_run = SimpleNamespace(start_date=NOW)
        return {"ti": ti, "task_state_store": self.states, "dag_run": dag_run}

    def execute(self, **arguments):
        """Run the next try."""
        self.try_number += 1
        return self.task(**arguments).execute(self.context)

    def ids(self):
        return [message.message_id for message in self.transport.sent]

    def bodies(self):
        return [message.body.decode() for message in self.transport.sent]


@pytest.fixture(name="run")
def run_fixture(monkeypatch):
    return Run(monkeypatch)


class Log:
    """What a task logged; Airflow writes its log lines to the standard output."""

    def __init__(self, capsys):
        self._capsys = capsys
        self._seen = ""

    @property
    def text(self):
        self._seen += self._capsys.readouterr().out
        return self._seen


@pytest.fixture(name="log")
def log_fixture(capsys):
    return Log(capsys)


def rows(count, **fields):
    return [{"value": f"body {number}", "delay_seconds": 60 + number, **fields} for number in range(count)]
