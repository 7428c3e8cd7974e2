"""The operations page in a browser, as an operator opens it under Airflow's menu: one message is seen and cancelled."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import demo_ui
import pytest
from support.browsed_page import Site, act, done, listed, says

from acceptance.conftest import Site as Browser
from acceptance.conftest import World
from airflow_delayed.message import DelayedMessage

pytestmark = pytest.mark.timeout(900)


def test_a_message_is_seen_and_cancelled(world: World, airflow_ui: Browser, tmp_path: Path) -> None:
    site = Site(world, demo_ui.Demo(world.live, tmp_path, world.broker.url), "", airflow_ui, tmp_path)
    with site.store() as store:
        store.install([])
        due = store.now() + timedelta(days=9)
        store.send([DelayedMessage(destination="letters", body=b"hush", due_at=due, message_id="letter", headers={})])
    page = site.open("op")
    listed(page, lambda ids: ids == ["letter"])
    assert "hush" not in page.text()
    page.click("input[aria-label='Choose letter']")
    act(page, "Cancel…", "Cancel them")
    says(page, "1 message cancelled.")
    done(page)
    assert site.state("letter") == "cancelled"
    assert world.stored() == 0
