"""The page about the API names the routes that there are, and the faults that it answers."""

from __future__ import annotations

import re
from pathlib import Path

from airflow_delayed.ui.app import create


def test_each_route_and_fault_is_described(here: Path):
    text = here.joinpath("docs", "operations", "api.md").read_text()
    table = [line for line in text.splitlines() if line.startswith("| `")]
    described = {
        re.sub(r"<\w+>|\?.*", "*", path)
        for line in table
        for path in re.findall(r"`(?:GET|POST) (api/v1/[^`]+)`", line)
    }
    others = re.findall(r"`(\w+)`", next(line for line in table if "cancel" in line))
    described |= {f"api/v1/stores/*/{name}" for name in others}
    api = create().openapi()
    there = {re.sub(r"\{\w+\}", "*", path).lstrip("/") for path in api["paths"]}
    assert {path.rstrip("*") for path in described} == {path.rstrip("*") for path in there}
    codes = api["components"]["schemas"]["ErrorInfo"]["properties"]["code"]["enum"]
    assert len(codes) > 10
    assert [code for code in codes if f"`{code}`" not in text] == []
