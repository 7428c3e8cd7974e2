"""What docs/development/architecture.md, CONTRIBUTING.md and the tables of situations name is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from support import pages

TOP = Path(__file__).resolve().parents[2]
ARCHITECTURE = TOP / "docs" / "development" / "architecture.md"
PAGES = [ARCHITECTURE, TOP / "CONTRIBUTING.md"]
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
#: What stands in backticks: a file, perhaps with names after it, or a folder.
_PLACE = re.compile(r"`((?:[\w.-]+/)*[\w.-]+\.(?:py|js|md|txt|toml)|(?:[\w.-]+/)+)(?:: ([\w., ]+))?`")

#: Packages whose docstring has a table of situations; its last column says where each is decided.
TABLES = sorted(
    file for file in (TOP / "airflow_delayed").rglob("__init__.py") if "where it is decided\n" in file.read_text()
)
_DECIDED = re.compile(r"((?:\w+/)*\w+\.py): ([\w.]+(?:, [\w.]+)*)")


def found(path: str) -> Path:
    """The file or folder of the package, or else of the repository, that a page names."""
    places = [root / path for root in (TOP / "airflow_delayed", TOP, *(page.parent for page in PAGES))]
    return next((place for place in places if place.exists()), places[0])


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def places(page: Path) -> list[tuple[str, str]]:
    """Each file that a page names, with each name in it, or an empty one."""
    return [
        (path, name.strip())
        for path, names in _PLACE.findall(prose(page))
        for name in (names.split(",") if names else [""])
    ]


@cache
def names(file: Path) -> set[str]:
    """The functions, classes and variables of a module, and those of its classes with the class's name before."""
    return {name for node in ast.parse(file.read_text()).body for name in made(node)}


def made(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        yield node.name
    elif isinstance(node, ast.ClassDef):
        yield node.name
        yield from (f"{node.name}.{name}" for each in node.body for name in made(each))
        methods = (each for each in node.body if isinstance(each, ast.FunctionDef))
        yield from (f"{node.name}.{name}" for method in methods for name in set_on_self(method))
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))


def set_on_self(method: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(method):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def last_column(file: Path) -> str:
    """The cells of the last column of a package's table, in one line."""
    lines = (ast.get_docstring(ast.parse(file.read_text())) or "").splitlines()
    top, head, bottom = (number for number, line in enumerate(lines) if line.startswith("==="))
    start = lines[top].rindex(" ") + 1
    return " ".join(cell for line in lines[head + 1 : bottom] if (cell := line[start:]))


@by_page
def test_each_file_that_a_page_names_is_there(page: Path) -> None:
    assert places(page)
    assert sorted({path for path, _ in places(page) if not found(path).exists()}) == []


@by_page
def test_each_name_is_in_its_file(page: Path) -> None:
    named = [(path, name) for path, name in places(page) if name]
    assert [f"{path}: {name}" for path, name in named if name not in names(found(path))] == []


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.parent.name)
def test_each_place_in_a_table_of_situations_is_there(table: Path) -> None:
    cells = last_column(table)
    # a place that the pattern does not see would go untested
    assert _DECIDED.sub("", cells).split() == []
    missing: list[str] = []
    for path, named in _DECIDED.findall(cells):
        file = own if (own := table.parent / path).exists() else found(path)
        there = names(file) if file.exists() else set()
        missing += [f"{path}: {name}" for name in named.split(", ") if name not in there]
    assert missing == []


def test_the_page_names_each_table_of_situations() -> None:
    assert TABLES
    assert {found(path) for path, _ in places(ARCHITECTURE)} >= set(TABLES)


def test_the_page_names_enough_to_be_of_use() -> None:
    assert sum(bool(name) for _, name in places(ARCHITECTURE)) > 100
    # a name that the pattern does not see would go untested
    assert re.findall(r"`[^`\n]*\.py: [^`\n]*`", prose(ARCHITECTURE)) == [
        match[0] for match in re.finditer(_PLACE, prose(ARCHITECTURE)) if match[2]
    ]


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
