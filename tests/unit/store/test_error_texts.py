"""What is shown of a database's errors: never what a row holds."""

from __future__ import annotations

import pytest

from airflow_delayed.store.engine import first_line


@pytest.mark.parametrize(
    "arguments, shown",
    [
        # PostgreSQL tells values in further lines
        (("duplicate key\nDETAIL:  Key (x)=(hush) already exists.",), "duplicate key"),
        # mysqlclient gives number and text
        ((1062, "Duplicate entry 'hush' for key 'one'"), "Duplicate entry ... for key 'one'"),
        ((1062, "Duplicate entry 'hu\n'sh' for key 'one'"), "Duplicate entry ... for key 'one'"),
        ((1366, "Incorrect string value: 'hush' for column `d`.`t`.`c` at row 1"), None),
        ((1292, "Truncated incorrect DOUBLE value: 'hush'"), "Truncated incorrect DOUBLE value: ..."),
        # mysql-connector-python
        (("1062 (23000): Duplicate entry 'hush' for key 'one'",), "1062 (23000): Duplicate entry ... for key 'one'"),
        ((2006, "Server has gone away"), "Server has gone away"),
        ((), "ValueError"),
    ],
)
def test_an_errors_text_quotes_no_row(arguments, shown):
    line = first_line(ValueError(*arguments))
    assert "hush" not in line
    assert shown is None or line == shown
