"""The table of tests/README.md names tests that there are, so that nobody removes the one that shows a fault."""

from __future__ import annotations

import re
from pathlib import Path


def test_each_test_that_the_table_names_is_there(here: Path) -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (here / "tests/README.md").read_text())
    assert len(named) > 40
    missing = [f"{file}::{name}" for file, name in named if f"def {name}(" not in (here / "tests" / file).read_text()]
    assert missing == []
