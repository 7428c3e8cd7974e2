"""docs/airflow/test-your-dag.md: its test passes, as a DAG's author would run it; its table names what there is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from support import pages

from airflow_delayed.testing.delayed import Delayed


def test_the_example_passes(here: Path, tmp_path: Path, airflow_db: None) -> None:
    dag, test = (text for _, text in pages.blocks(here / "docs/airflow/test-your-dag.md"))
    for path, text in {"dags/invoices.py": dag, "tests/test_invoices.py": test}.items():
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests"],
        cwd=tmp_path,
        env={
            **os.environ,
            "AIRFLOW__CORE__DAGS_FOLDER": str(tmp_path / "dags"),
            "PYTHONPATH": f"{here}{os.pathsep}{tmp_path / 'dags'}",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "4 passed" in done.stdout


def test_the_table_names_all_that_a_test_may_use(here: Path) -> None:
    text = (here / "docs/airflow/test-your-dag.md").read_text()
    named = set(re.findall(r"`delayed\.(\w+)", text.partition("\n|---|---|\n")[2]))
    # these are for the fixture's own parts
    assert named == {name for name in vars(Delayed) if name[0] != "_"} - {"type_of", "ensure", "note", "opened"}


def test_its_links_lead_somewhere(here: Path) -> None:
    for link in pages.links(here / "docs/README.md"):
        assert (here / "docs" / link).exists()
