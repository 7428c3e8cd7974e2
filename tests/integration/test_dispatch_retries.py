"""A dispatch run that gave messages up fails in the end, whatever happened to the worker or the triggerer meanwhile."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from types import SimpleNamespace

import pytest
from airflow.sdk.exceptions import AirflowFailException
from support.stores import Store, Transport, message

from airflow_delayed.operators import dispatch
from airflow_delayed.operators.dispatch import StoreDispatchOperator
from airflow_delayed.store.dispatch.report import DispatchFailed
from airflow_delayed.triggers import store_dispatch
from airflow_delayed.triggers.store_dispatch import StoreDispatchTrigger

SECOND = timedelta(seconds=1)


class States(dict):
    """A task state store."""

    def set(self, key, value, retention=None):
        self[key] = value


class Run:
    """The tries of one task."""

    def __init__(self, store: Store, broker: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = store
        self.ti = SimpleNamespace(try_number=0, max_tries=2)
        self.states = States()
        for module in (dispatch, store_dispatch):
            monkeypatch.setattr(module, "delivery_for", lambda conn_id, clock: broker)

    def try_it(self) -> dict[str, object]:
        self.ti.try_number += 1
        task = StoreDispatchOperator(
            task_id="dispatch",
            store_conn_id=self.store.conn_id,
            schema=self.store.schema,
            deliver_conn_ids=["broker"],
            lookahead=timedelta(0),
            give_up_after=timedelta(0),
        )
        return task.execute({"ti": self.ti, "task_state_store": self.states})


@pytest.fixture
def broker() -> Transport:
    return Transport(too_long={"bad"})


@pytest.fixture
def run(store: Store, broker: Transport, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(store, broker, monkeypatch)


def test_a_retry_fails_for_what_an_earlier_try_gave_up(store: Store, broker: Transport, run: Run) -> None:
    hook = store.installed()
    due = hook.now() - SECOND
    hook.send([message("bad", due), message("good", due)])
    broker.lost_after = 0
    with pytest.raises(DispatchFailed, match="not available"):
        run.try_it()
    assert set(store.given_up(hook)) == {"bad"}
    broker.lost_after = None
    with pytest.raises(AirflowFailException, match=r"1 messages were dispatched, 1 failed.*message bad: body"):
        run.try_it()
    assert broker.ids == ["good"]


def test_a_cleared_task_and_another_run_do_not_fail_for_it(store: Store, broker: Transport, run: Run) -> None:
    hook = store.installed()
    hook.send([message("bad", hook.now() - SECOND)])
    with pytest.raises(AirflowFailException):
        run.try_it()
    run.ti.max_tries += 1
    assert run.try_it()["failed"] == 0
    run.states = States()
    assert run.try_it()["failed"] == 0


def test_a_triggerer_that_takes_over_fails_for_what_the_lost_one_gave_up(store: Store, run: Run) -> None:
    hook = store.installed()
    began = hook.now()
    hook.send([message("bad", began - SECOND)])
    policy = {"lookahead": 0.0}

    async def event() -> dict[str, object]:
        trigger = StoreDispatchTrigger(
            store.conn_id, ["broker"], schema=store.schema, policy=policy, began=began.isoformat()
        )
        async for each in trigger.run():
            return dict(each.payload)
        raise AssertionError("it ended without an event")

    # the first one is lost before its event is stored
    assert asyncio.run(event())["status"] == "given up"
    second = asyncio.run(event())
    assert (second["status"], second["summary"]["failed"]) == ("given up", 1)
    assert "message bad: body: has too many bytes" in str(second["error"])
