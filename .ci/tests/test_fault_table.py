"""The table of tests/README.md names tests that there are, so that nobody removes the one that shows a fault."""

from __future__ import annotations

import ast
import re
from pathlib import Path


def test_each_test_that_the_table_names_is_there(here: Path) -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (here / "tests/README.md").read_text())
    assert len(named) > 40
    missing = [f"{file}::{name}" for file, name in named if f"def {name}(" not in (here / "tests" / file).read_text()]
    assert missing == []


def test_what_make_test_shows_is_not_only_in_make_test_long(here: Path) -> None:
    rows = [line.split("|") for line in (here / "tests/README.md").read_text().splitlines() if "::test_" in line]
    named = [each for row in rows for each in re.findall(r"`([\w/]+\.py)::(\w+)`", row[2])]
    assert len(named) > 40
    assert [f"{file}::{name}" for file, name in named if name in only_long(here / "tests" / file)] == []


def only_long(file: Path) -> set[str]:
    """Return the tests of a file that are fuzzers or have the mark ``long``, by themselves or with their whole file."""
    body = ast.parse(file.read_text()).body
    marks = [ast.unparse(node.value) for node in body if isinstance(node, ast.Assign) and is_mark(node.targets[0])]
    tests = [node for node in body if isinstance(node, ast.FunctionDef)]
    if any("mark.long" in mark for mark in marks):
        return {test.name for test in tests}
    return {
        test.name
        for test in tests
        if {"pytest.mark.long", "pytest.mark.fuzz"} & {*map(ast.unparse, test.decorator_list)}
    }


def is_mark(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) and target.id == "pytestmark"
