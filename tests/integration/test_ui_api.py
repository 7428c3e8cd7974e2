"""The operations page's API: what each route answers, with Airflow's own login and a real store."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest
from support.operations_page import Page, serving
from support.stores import Store, message, store_fixture  # noqa: F401 - a fixture

LATER = datetime(2030, 5, 6, 7, 8, 9, 123456, tzinfo=timezone.utc)


@pytest.fixture
def page(store: Store, airflow_db: None, monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setenv("AIRFLOW__DELAYED__PAGE_STORES", store.conn_id)
    with serving(tmp_path) as served:
        yield served


def test_smoke(store: Store, page: Page):
    hook = store.installed()
    print(page.ask("GET", "/").text[:300])
    print(page.get("/api/v1/connections", "viewer"))
    print(page.get(f"/api/v1/stores/{store.conn_id}/summary", "viewer"))
    assert 0
