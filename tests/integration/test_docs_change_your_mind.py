"""The code of the store's how-to pages is run as it stands."""

from __future__ import annotations

import shlex

import pytest
from support import pages
from support.stores import Store

pytestmark = pytest.mark.parametrize("store", ["sqlite"], indirect=True)


@pytest.fixture
def page(store: Store, here, connect, tmp_path):
    connect("reminders_db", conn_type="sqlite", host=str(tmp_path / "reminders.db"))
    return here / "docs" / "store" / "change-your-mind.md"


def test_change_your_mind(page):
    assert len(list(pages.run(page))) == 12


def test_each_command_is_one(page):
    from airflow.cli import cli_parser

    parser = cli_parser.get_parser()
    lines = [line for language, text in pages.blocks(page) if language == "bash" for line in text.splitlines()]
    assert len(lines) == 11
    for line in lines:
        words = shlex.split(line)
        assert words[:2] == ["airflow", "delayed"]
        assert parser.parse_args(words[1:]).store_conn_id == "reminders_db"
