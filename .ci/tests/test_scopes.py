"""The groups of files and their order name files that there are, so that a renamed one does not lose its place."""

from __future__ import annotations

from pathlib import Path

from support.scopes import GROUPS, LONG_FILES


def test_each_file_is_there(here: Path) -> None:
    names = [*LONG_FILES, *(name for group in GROUPS.values() for name in group)]
    assert [name for name in names if not list(here.glob(f"{name}*"))] == []
