"""docs/airflow/test-your-dag.md: its test passes, as a DAG's author would run it; its table names what there is."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from support import pages

from airflow_delayed.testing.delayed import Delayed

pytestmark = pytest.mark.long


class Results:
    """What became of the tests of a run inside this one."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self.outcomes[report.nodeid.rpartition("::")[2]] = report.outcome


def test_the_example_passes(here: Path, tmp_path: Path, airflow_db: None, monkeypatch: pytest.MonkeyPatch) -> None:
    dag, test, nightly, test_nightly = (text for _, text in pages.blocks(here / "docs/airflow/test-your-dag.md"))
    # in the DAGs folder, where dag.test() looks for it
    folder = Path(os.environ["AIRFLOW__CORE__DAGS_FOLDER"])
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_invoices.py").write_text(test)
    (tmp_path / "tests/test_nightly.py").write_text(test_nightly)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.chdir(tmp_path)
    results = Results()
    (folder / "invoices.py").write_text(dag)
    (folder / "nightly.py").write_text(nightly)
    # pytest in this process, which has Airflow imported; what would outlast the run inside is left to the outer one
    outer = [f"-pno:{name}" for name in ("cacheprovider", "faulthandler", "unraisableexception", "threadexception")]
    try:
        ended = pytest.main(["-q", "--rootdir=.", *outer, "tests"], plugins=[results])
    finally:
        for name in ("invoices", "nightly"):
            (folder / f"{name}.py").unlink()
        for name in ("invoices", "test_invoices", "nightly", "test_nightly"):
            sys.modules.pop(name, None)
    assert (ended, list(results.outcomes.values())) == (0, ["passed"] * 7)


def test_the_table_names_all_that_a_test_may_use(here: Path) -> None:
    text = (here / "docs/airflow/test-your-dag.md").read_text()
    named = set(re.findall(r"`delayed\.(\w+)", text.partition("\n|---|---|\n")[2]))
    # stores is for the stand-ins
    assert named == {name for name in dir(Delayed(pytest.MonkeyPatch())) if name[0] != "_"} - {"stores"}
