"""What the operations page says of stores that are away, slow, not installed or not there."""

from __future__ import annotations

import asyncio
import itertools
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager

import pytest
from airflow.sdk.providers_manager_runtime import ProvidersManagerTaskRuntime
from support.operations_page import Page, serving
from support.stores import Store

from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.ui.hook_pool import HookPool

pytestmark = pytest.mark.parametrize("store", ["postgres"], indirect=True)


@contextmanager
def silent() -> Iterator[int]:
    """Listen on a port, and never answer."""
    with socket.create_server(("127.0.0.1", 0), backlog=50) as server:
        yield server.getsockname()[1]


def test_one_that_is_away_says_so_and_does_not_hold_up_the_others(
    store: Store, page: Page, connect, monkeypatch: pytest.MonkeyPatch
):
    store.installed()
    connect("away", "postgresql://somebody:secret@127.0.0.1:1/nothing")
    monkeypatch.setenv("AIRFLOW__DELAYED__PAGE_STORES", f"away,{store.conn_id}, undefined_connection,")
    monkeypatch.setenv("AIRFLOW__DELAYED__VIEWERS", "plugins")
    found = page.get("/api/v1/connections", "viewer")["connections"]
    assert [one["connection_id"] for one in found] == ["away", store.conn_id, "undefined_connection"]
    for rest, query in (("summary", {}), ("messages", {}), ("message", {"id": "m"})):
        answer = page.ask("GET", f"/api/v1/stores/away/{rest}", "viewer", params=query)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unreachable")
        # where it is and who logs in is for those who may read the connection
        assert answer.json()["error"]["message"] == "connection 'away' cannot be used; the api-server's log says why"
        answer = page.ask("GET", f"/api/v1/stores/away/{rest}", "op", params=query)
        assert "127.0.0.1" in answer.json()["error"]["message"]
        assert "secret" not in answer.text
    body = {"ids": ["m"], "dry_run": False}
    assert page.error("POST", "/api/v1/stores/away/cancel", json=body) == (503, "unreachable")
    assert page.error("GET", "/api/v1/stores/undefined_connection/summary") == (409, "not_ready")
    assert page.get(f"/api/v1/stores/{store.conn_id}/summary")["waiting"] == 0


def test_tables_that_are_not_there(store: Store, page: Page):
    hook = store.hook()
    for table in hook.tables:
        table.drop(hook.engine)
    answer = page.ask("GET", f"/api/v1/stores/{store.conn_id}/summary", "op")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "not_ready")
    assert "TopologyInstallOperator" in answer.json()["error"]["message"]
    hook.install([])
    assert page.get(f"/api/v1/stores/{store.conn_id}/summary", "op")["waiting"] == 0


def test_a_library_that_is_not_installed_is_named_to_every_viewer(
    store: Store, page: Page, connect, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(ProvidersManagerTaskRuntime().hooks, "mysql", None)
    connect("database", "mysql://somebody:secret@127.0.0.1/nothing")
    connect("cloud", "aws://")
    monkeypatch.setenv("AIRFLOW__DELAYED__PAGE_STORES", "database")
    monkeypatch.setenv("AIRFLOW__DELAYED__PAGE_SQS", "cloud:orders")
    monkeypatch.setenv("AIRFLOW__DELAYED__VIEWERS", "plugins")
    monkeypatch.setitem(sys.modules, "airflow.providers.amazon.aws.hooks.sqs", None)
    monkeypatch.delitem(sys.modules, "airflow_delayed.hooks.sqs", raising=False)
    for path, extra in (("stores/database/summary", "mysql"), ("sqs/cloud/orders/summary", "sqs")):
        answer = page.ask("GET", f"/api/v1/{path}", "viewer")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "not_ready")
        assert f"pip install 'airflow-provider-delayed[{extra}]'" in answer.json()["error"]["message"]


def test_one_that_never_answers_is_not_waited_for(
    store: Store, airflow_db: None, connect, monkeypatch: pytest.MonkeyPatch, tmp_path
):
    store.installed()
    # none of the calls ends by itself meanwhile
    monkeypatch.setattr("airflow_delayed.store.network.CONNECT_SECONDS", 120)
    with silent() as port, serving(tmp_path, HookPool(seconds=0.3)) as page:
        connect("silent", f"postgresql://somebody:secret@127.0.0.1:{port}/nothing")
        monkeypatch.setenv("AIRFLOW__DELAYED__PAGE_STORES", f"silent,{store.conn_id}")
        url = "/api/v1/stores/silent/"
        # who asks for the same figures is told at once that they were not there in time
        assert page.error("GET", f"{url}summary", "op") == (504, "too_slow")
        for _ in range(5):
            assert page.error("GET", f"{url}summary", "op") == (503, "busy")
        for _ in range(3):
            assert page.error("GET", f"{url}messages", "op") == (504, "too_slow")
        # by now four wait, and whoever comes next is told at once
        assert page.error("GET", f"{url}messages", "op") == (503, "busy")
        assert sum(one.name == "delayed-deliveries" for one in threading.enumerate()) == 4
        # the other is asked by threads of its own
        assert asyncio.run(page.pool.call_store(store.conn_id, lambda hook: hook.count(), seconds=60)) == 0


def test_requests_at_one_that_hangs_take_no_thread_from_others(
    store: Store, airflow_db: None, connect, monkeypatch: pytest.MonkeyPatch, tmp_path
):
    connect("broker", conn_type="rabbitmq")
    monkeypatch.setenv("AIRFLOW__DELAYED__PAGE_RABBITMQ", "broker")
    go = threading.Event()
    monkeypatch.setattr(RabbitMQDelayHook, "waiting", lambda hook: go.wait())
    with serving(tmp_path, HookPool(seconds=600)) as page:

        def other() -> str:
            """Answer as Airflow's own routes do, in one of the threads that all of them share."""
            return "at once"

        page.app.add_api_route("/another/route", other)
        with ThreadPoolExecutor(200) as pool:
            asked = [pool.submit(page.ask, "GET", "/api/v1/rabbitmq/broker/summary") for _ in range(200)]
            try:
                refused = [one.result(60) for one in itertools.islice(as_completed(asked, timeout=60), 192)]
                # the eight others hang
                assert page.ask("GET", "/another/route", top="").json() == "at once"
                assert sum(not one.done() for one in asked) == 8
            finally:
                go.set()
    assert {(one.status_code, one.headers["Retry-After"]) for one in refused} == {(503, "5")}
