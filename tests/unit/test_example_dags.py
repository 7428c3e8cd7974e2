"""dags/README.md names each example, its size and its connections; each example says how to run it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

DAGS = Path(__file__).resolve().parents[2] / "dags"
EXAMPLES = sorted(path.name for path in DAGS.glob("*.py"))
#: Of the example connections that the DAGs use.
CONNECTION = r"delayed_(?:sqs|store|rabbitmq)|spark_default"
#: By file, the cells of its row.
ROWS = {
    found[1]: row.strip("| ").split(" | ")
    for row in (DAGS / "README.md").read_text().splitlines()
    if (found := re.search(r"\[(\w+\.py)\]\(\1\)", row))
}


def test_the_table_has_all_examples():
    assert sorted(ROWS) == EXAMPLES


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_row_of_the_table_is_true(name):
    code = (DAGS / name).read_text()
    _, _, lines, connections = ROWS[name]
    # rounded; a line more or less must not need a change of the table
    assert abs(len(code.splitlines()) - int(lines)) <= 10
    assert set(re.findall(CONNECTION, connections)) == set(re.findall(f'"({CONNECTION})"', code))


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "quickstart.py"])
def test_an_example_says_what_it_does_needs_and_how_to_run_it(name):
    code = (DAGS / name).read_text()
    what, needs, how = (ast.get_docstring(ast.parse(code)) or "").split("\n\n")
    assert what.endswith(".")
    assert re.match(r"Connections?: ", needs)
    assert set(re.findall(CONNECTION, needs)) == set(re.findall(f'"({CONNECTION})"', code))
    assert how.startswith("Run: ")
    assert code.count("DAG(\n") + code.count('DAG("') == code.count("doc_md=__doc__")
