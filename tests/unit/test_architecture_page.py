"""What docs/development/architecture.md and CONTRIBUTING.md name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import pages

TOP = Path(__file__).resolve().parents[2]
ARCHITECTURE = TOP / "docs" / "development" / "architecture.md"
PAGES = [ARCHITECTURE, TOP / "CONTRIBUTING.md"]
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
#: What stands in backticks: a file, perhaps with names after it, or a folder.
_PLACE = re.compile(r"`((?:[\w.-]+/)*[\w.-]+\.(?:py|js|md|txt|toml)|(?:[\w.-]+/)+)(?:: ([\w., ]+))?`")


def found(path: str) -> Path:
    """The file or folder of the package, or else of the repository, that a page names."""
    places = [root / path for root in (TOP / "airflow_delayed", TOP, *(page.parent for page in PAGES))]
    return next((place for place in places if place.exists()), places[0])


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def places(page: Path) -> set[str]:
    """Each file and folder that a page names."""
    return {path for path, _ in _PLACE.findall(prose(page))}


@by_page
def test_each_file_that_a_page_names_is_there(page: Path) -> None:
    assert places(page)
    assert sorted(path for path in places(page) if not found(path).exists()) == []


def test_the_code_of_the_page_prints_what_the_page_says() -> None:
    assert len(list(pages.run(ARCHITECTURE))) == 2


@by_page
def test_links_lead_somewhere(page: Path) -> None:
    assert [link for link in pages.links(page) if not (page.parent / link.partition("#")[0]).exists()] == []


@pytest.mark.parametrize("index", ["README.md", "docs/README.md"])
def test_both_pages_are_linked(index: str) -> None:
    file = TOP / index
    linked = {(file.parent / link.partition("#")[0]).resolve() for link in pages.links(file)}
    assert set(PAGES) <= linked
