"""docs/store/own-store.md: its store keeps the contract and is dispatched from. The page's own tests are run here."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support import pages

from airflow_delayed.store.protocol import DelayedMessageStore
from airflow_delayed.testing.store_contract import StoreContract

pytestmark = pytest.mark.long

PAGE = Path(__file__).resolve().parents[2] / "docs/store/own-store.md"

_store, _tests = (text for _, text in pages.blocks(PAGE))
sys.modules["my_stores"] = ModuleType("my_stores")
exec(compile(_store, "my_stores.py", "exec"), vars(sys.modules["my_stores"]))
# pytest takes them for this module's
exec(compile(_tests, "test_my_stores.py", "exec"))


def test_the_page_has_tests_and_says_how_many_the_contract_has() -> None:
    names = set(re.findall(r"^(?:class|def) (\w+)", _tests, re.MULTILINE))
    assert names == {"TestFileStore", "test_what_is_due_soon_is_dispatched"} <= set(globals())
    tests = [name for name in vars(StoreContract) if name.startswith("test_")]
    assert f"`StoreContract` is {len(tests)} tests" in " ".join(PAGE.read_text().split())


def test_the_table_names_the_whole_protocol() -> None:
    named = re.findall(r"^\| `(\w+)\(", PAGE.read_text(), re.MULTILINE)
    assert named == [name for name in vars(DelayedMessageStore) if not name.startswith("_")]
