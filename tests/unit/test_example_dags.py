"""dags/README.md names each example, its size and its connections; each example says how to run it."""

from __future__ import annotations

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
