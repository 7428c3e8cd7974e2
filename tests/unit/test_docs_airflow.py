"""docs/airflow and docs/security.md: their code makes what it says, and the tables name every field and parameter."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from airflow.sdk import Asset
from pika import BasicProperties
from support import pages

from airflow_delayed import sources
from airflow_delayed.notifications.notifiers import DelayedNotifier
from airflow_delayed.rabbitmq.consumer import event_payload
from airflow_delayed.triggers.rabbitmq_message import RabbitMQMessageTrigger

WATCH = Path(__file__).resolve().parents[2] / "docs" / "airflow" / "watch.md"


def first_cells(heading: str) -> list[str]:
    """What stands in backticks in the first cells of the tables under a heading."""
    text = WATCH.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\|([^|]*)\|", text, re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def test_the_code_makes_a_dag_with_a_watcher_and_amazons_watcher() -> None:
    names: dict[str, object] = {}
    for language, text in pages.blocks(WATCH):
        assert language == "python"
        exec(compile(text, str(WATCH), "exec"), names)
    rabbit, sqs = names["orders"], names["reminders"]
    assert isinstance(rabbit, Asset)
    assert isinstance(sqs, Asset)
    assert rabbit.watchers[0].trigger.serialize()[1] == {"conn_id": "rabbitmq_default", "queue": "orders"}
    assert sqs.watchers[0].trigger.serialize()[1]["waiter_delay"] == 1


def test_the_pages_of_notifiers_make_dags_and_name_every_parameter() -> None:
    page = WATCH.with_name("notifiers.md")
    assert list(pages.run(page)) == [None, None]
    parameters = set(inspect.signature(DelayedNotifier).parameters)
    assert {name for name in parameters if f"`{name}`" in page.read_text()} == parameters - {"context"}


def test_the_page_of_sources_and_its_code() -> None:
    page = WATCH.with_name("sources.md")
    names: dict[str, object] = {}
    for language, text in pages.blocks(page):
        assert language == "python"
        exec(compile(text, str(page), "exec"), names)
    assert set(sources.__all__) == set(re.findall(r"^\| `(\w+Source)\(", page.read_text(), re.MULTILINE))


def test_the_page_of_security_and_its_code() -> None:
    page = WATCH.parents[1] / "security.md"
    assert list(pages.run(page)) == [None]
    for link in pages.links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), link
        assert not anchor or anchor in pages.anchors(target), link
    assert page.name in pages.links(WATCH.parents[1] / "README.md")


@pytest.mark.parametrize("page", sorted(WATCH.parent.glob("*.md")), ids=lambda page: page.stem)
def test_links_lead_somewhere_and_the_index_names_the_page(page: Path) -> None:
    for link in pages.links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), link
        assert not anchor or anchor in pages.anchors(target), link
    assert f"airflow/{page.name}" in pages.links(WATCH.parents[1] / "README.md")


def test_every_field_and_every_parameter_is_named() -> None:
    fields = {*event_payload(BasicProperties(), b"", redelivered=False), "body", "body_base64"}
    parameters = set(inspect.signature(RabbitMQMessageTrigger).parameters)
    assert set(first_cells("What an event says")) == fields | parameters
