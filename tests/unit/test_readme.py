"""The README is short, and its quickstart is the one that tests/integration/test_docs_quickstart.py runs."""

from __future__ import annotations

from pathlib import Path

from support import pages

TOP = Path(__file__).resolve().parents[2]
README = TOP / "README.md"


def test_it_has_at_most_900_words() -> None:
    assert len(README.read_text().split()) <= 900


def test_its_commands_are_those_of_the_quickstart() -> None:
    page = {line for _, text in pages.blocks(TOP / "docs/start/quickstart.md") for line in text.splitlines()}
    lines = [
        line for language, text in pages.blocks(README) if language in ("bash", "sh") for line in text.splitlines()
    ]
    assert len(lines) == 8
    assert [line for line in lines if line not in page] == []


def test_its_dag_is_the_quickstart() -> None:
    (dag,) = (text for language, text in pages.blocks(README) if language == "python")
    assert (TOP / "dags/quickstart.py").read_text().endswith(f"annotations\n\n{dag}")


def test_its_links_lead_somewhere() -> None:
    assert [link for link in pages.links(README) if not (TOP / link.partition("#")[0]).exists()] == []
