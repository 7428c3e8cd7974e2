"""docs/airflow and docs/security.md: their code makes what it says, and the tables name every field and parameter."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from support import pages

from airflow_delayed import sources
from airflow_delayed.notifications.notifiers import DelayedNotifier

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_pages_of_notifiers_make_dags_and_name_every_parameter() -> None:
    page = DOCS / "airflow/notifiers.md"
    assert list(pages.run(page)) == [None, None]
    parameters = set(inspect.signature(DelayedNotifier).parameters)
    assert {name for name in parameters if f"`{name}`" in page.read_text()} == parameters - {"context"}


def test_the_page_of_sources_and_its_code() -> None:
    page = DOCS / "airflow/sources.md"
    names: dict[str, object] = {}
    for language, text in pages.blocks(page):
        assert language == "python"
        exec(compile(text, str(page), "exec"), names)
    assert set(sources.__all__) == set(re.findall(r"^\| `(\w+Source)\(", page.read_text(), re.MULTILINE))


def test_the_page_of_security_and_its_code() -> None:
    page = DOCS / "security.md"
    assert list(pages.run(page)) == [None]
    assert page.name in pages.links(DOCS / "README.md")
