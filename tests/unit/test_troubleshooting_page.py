"""docs/operations/troubleshooting.md quotes texts and codes that the code has, and leaves out no code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import pages

from airflow_delayed.delivery import Finding, State

#: A varying part of a text.
VARIES = "\0"
MAKERS = {"Finding", "replace", "unknown", "warning"}
#: SQLite's own text, see below.
LOCKED = "database is locked"
CODES = {
    *("no-dispatcher", "dispatcher-fails", "connection-fails", "destination-refuses", "destination-missing", "overdue"),
    *("failed", "paused", "lease-too-short", "missing", "differs", "unreachable", "silent", "version"),
    *("clock-difference", "unroutable", "stuck", "destination-full", "no-leader", "node-down", "dead-letters"),
    "could-expire",
}


@pytest.fixture
def page(here: Path) -> Path:
    return here / "docs" / "operations" / "troubleshooting.md"


@pytest.fixture(scope="module")
def trees() -> list[ast.Module]:
    package = Path(__file__).resolve().parents[2] / "airflow_delayed"
    return [ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))]


def assigned(trees: list[ast.Module]) -> dict[str, list[ast.expr]]:
    """The values of each name that is assigned to."""
    found: dict[str, list[ast.expr]] = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                found.setdefault(node.targets[0].id, []).append(node.value)
    return found


def strings(value: ast.expr, names: dict[str, list[ast.expr]]) -> Iterator[str]:
    """The texts that an expression may have: a text, a choice of texts, or a name of one of these."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value
    elif isinstance(value, ast.IfExp):
        yield from strings(value.body, names)
        yield from strings(value.orelse, names)
    elif isinstance(value, ast.Name):
        for other in names.get(value.id, ()):
            if not isinstance(other, ast.Name):
                yield from strings(other, names)


def read_codes(trees: list[ast.Module]) -> set[str]:
    """Every code that a finding can have; of what is missing or differs it is that of its state."""
    found: set[str] = set()
    every = assigned(trees)
    for tree in trees:
        names = {**every, **assigned([tree])}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in MAKERS:
                given = {each.arg: each.value for each in node.keywords}
                if node.func.id in ("unknown", "warning"):
                    given.setdefault("code", node.args[0])
                if "code" in given:
                    found.update(strings(given["code"], names))
                elif isinstance(state := given.get("state"), ast.Attribute) and state.attr in ("MISSING", "DIFFERS"):
                    found.add(str(Finding(state=State[state.attr], resource="").to_json()["code"]))
    return found


@pytest.fixture(scope="module")
def codes(trees: list[ast.Module]) -> set[str]:
    return read_codes(trees)


def texts(here: Path, trees: list[ast.Module]) -> str:
    """All texts of the code, with one character for each varying part."""
    found = []
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else VARIES for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%(\.\d)?[srdgf]", VARIES, node.value))
    for path in (here / "airflow_delayed" / "ui" / "static").glob("*.js"):
        found.append(re.sub(r"\$\{[^}]*\}", VARIES, path.read_text()))
    return "\n".join(found)


def test_each_code_is_in_the_last_table_and_no_other_is(page: Path, codes: set[str]) -> None:
    table = page.read_text().partition("\n## Findings by code\n")[2]
    listed = [code for row in re.findall(r"^\|([^|]*)\|", table, re.MULTILINE) for code in re.findall("`(.*?)`", row)]
    assert len(listed) == len(set(listed))
    assert {*listed} == codes == CODES


def test_each_text_is_one_of_the_code(page: Path, here: Path, trees: list[ast.Module]) -> None:
    known = texts(here, trees)
    quoted = [line for language, text in pages.blocks(page) if language == "text" for line in text.splitlines()]
    assert len(quoted) > 35
    for line in quoted:
        parts = [part for part in line.split("…") if part.strip(" .:,")]
        assert max(map(len, parts)) > 10, line
        assert [part for part in parts if part not in known and line != LOCKED] == [], line
