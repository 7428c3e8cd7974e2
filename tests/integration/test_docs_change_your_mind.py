"""The code of the store's how-to pages is run as it stands."""

from __future__ import annotations

import shlex

import pytest
from support import pages
from support.stores import Store

pytestmark = [pytest.mark.parametrize("store", ["sqlite"], indirect=True), pytest.mark.long]


@pytest.fixture
def page(store: Store, here, connect, tmp_path):
    connect("reminders_db", conn_type="sqlite", host=str(tmp_path / "reminders.db"))
    return here / "docs" / "store" / "change-your-mind.md"


def test_change_your_mind(page):
    assert len(list(pages.run(page))) == 12


def test_pause_and_resume(page):
    assert len(list(pages.run(page.with_name("pause.md")))) == 3


@pytest.mark.parametrize("name, commands", [("change-your-mind", 9), ("pause", 4)])
def test_each_command_is_one(page, name: str, commands: int):
    from airflow.cli import cli_parser

    parser = cli_parser.get_parser()
    blocks = pages.blocks(page.with_name(f"{name}.md"))
    lines = [line for language, text in blocks if language == "bash" for line in text.splitlines()]
    assert len(lines) == commands
    for line in lines:
        words = shlex.split(line)
        assert words[:2] == ["airflow", "delayed"]
        assert parser.parse_args(words[1:]).store_conn_id == "reminders_db"
