"""What the installed Airflow lacks is said where an operator looks: by ``verify``, and once in the API server's log."""

from __future__ import annotations

import asyncio

import pytest

from airflow_delayed import compat
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.ui import app
from airflow_delayed.ui.plugin import LazyApp


@pytest.fixture
def hook(monkeypatch, tmp_path):
    monkeypatch.setenv("AIRFLOW_CONN_STORE", f"sqlite:///{tmp_path}/store.db")
    hook = DelayedStoreHook("store", "broker")
    hook.install([])
    yield hook
    hook.close()


@pytest.mark.parametrize(
    "lacking, value, text",
    [("KEEPS_STATE", False, "keeps no state"), ("never_expire", lambda: None, "NEVER_EXPIRE")],
)
def test_what_this_airflow_lacks_is_a_warning(hook, monkeypatch, caplog, lacking, value, text):
    assert [finding.code for finding in hook.verify([]) if finding.code] == []
    monkeypatch.setattr(compat, lacking, value)
    report = hook.verify([])
    (finding,) = (each for each in report if each.code)
    assert (finding.code, text in str(finding), report.ok) == ("version", True, True)

    async def answer(scope, receive, send):
        pass

    monkeypatch.setattr(app, "create", lambda: answer)
    page = LazyApp()
    for _ in range(3):
        asyncio.run(page({"type": "http"}, None, None))
    (line,) = [record for record in caplog.records if record.name.startswith("airflow_delayed.ui")]
    assert line.getMessage() in [str(finding) for finding in report]
