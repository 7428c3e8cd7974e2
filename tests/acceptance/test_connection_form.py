"""The form of a RabbitMQ connection in the real UI: filled in, tested, edited, tested again, in a headless browser."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from acceptance.conftest import Site, World
from services import chromium

NAME = "by_form"
pytestmark = [pytest.mark.timeout(600), pytest.mark.long]


@pytest.fixture
def page(world: World, airflow_ui: Site) -> Iterator[chromium.Page]:
    yield airflow_ui.open("admin", "/connections", height=2600)
    world.live.call("DELETE", f"/connections/{NAME}")


def answered(page: chromium.Page, says: str) -> None:
    """Press the button until its answer is seen: a change draws the list anew, and the answer does not stay."""
    for tries_left in reversed(range(3)):
        page.click("button[aria-label='Test Connection']")
        try:
            page.wait_for(f"document.body.innerText.includes({json.dumps(says)})", seconds=60)
            return
        except TimeoutError:
            if not tries_left:
                raise


def type_extra(page: chromium.Page, name: str, value: str) -> None:
    """Type into an extra field until that stays: a form that is still loading fills the field once more."""
    field = f"input[name=element_{name}]"
    for _ in range(10):
        page.fill(field, value)
        page.press("Tab")
        time.sleep(0.5)
        if page.evaluate(f"document.querySelector({json.dumps(field)}).value") == value:
            return
    raise TimeoutError(f"the field {name} does not keep {value}")


def test_a_connection_is_made_tested_and_edited(world: World, page: chromium.Page, tmp_path: Path) -> None:
    broker = world.broker.connection
    page.click("button", text="Add Connection")
    page.fill("input[name=connection_id]", NAME)
    page.fill("input[role=combobox]", "RabbitMQ")
    page.click("[role=option]", text="RabbitMQ (delayed delivery)")
    for field, value in {**broker, "schema": "nowhere"}.items():
        if field not in ("conn_type", "extra"):
            page.fill(f"input[name={field}]", str(value))
    page.click("button", text="Extra Fields")
    type_extra(page, "heartbeat", "30")
    page.click("#element_topology")
    page.click("[role=option]", text="celery")
    page.screenshot(tmp_path / "form.png")
    page.click("button", text="Save")

    answered(page, "schema) does not exist")
    page.screenshot(tmp_path / "failed.png")

    page.click("button[aria-label='Edit Connection']")
    page.fill("input[name=schema]", world.broker.name)
    page.click("button", text="Extra Fields")
    # what was saved is in the form again, and what was not chosen is told as the default
    for text in ("celery", "verify_peer (default)", "plain (default)", "conventional (default)"):
        page.wait_for(f"document.body.innerText.includes({json.dumps(text)})")
    type_extra(page, "heartbeat", "60")
    page.click("button", text="Save")
    page.wait_for("document.body.innerText.includes('successfully updated')")

    answered(page, "Connected to RabbitMQ at")
    page.screenshot(tmp_path / "good.png")
    assert page.problems == []

    saved = world.live.call("GET", f"/connections/{NAME}")
    assert (saved["conn_type"], saved["host"], saved["schema"]) == ("rabbitmq", broker["host"], world.broker.name)
    extra = {name: value for name, value in json.loads(saved["extra"]).items() if value is not None}
    assert extra == {"ssl": False, "heartbeat": 60, "topology": "celery"}
