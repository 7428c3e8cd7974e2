"""The page about the API names the routes that there are, and the faults that it answers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from airflow_delayed.ui.app import create
from airflow_delayed.ui.models import Code


def test_each_route_and_fault_is_described(here: Path):
    text = here.joinpath("docs", "operations", "api.md").read_text()
    table = [line for line in text.splitlines() if line.startswith("| `")]
    told = {
        re.sub(r"<\w+>|\?.*", "*", path)
        for line in table
        for path in re.findall(r"`(?:GET|POST) (api/v1/[^`]+)`", line)
    }
    others = re.findall(r"`(\w+)`", next(line for line in table if "cancel" in line))
    told |= {f"api/v1/stores/*/{name}" for name in others}
    there = {re.sub(r"\{\w+\}", "*", path).lstrip("/") for path in create().openapi()["paths"]}
    assert {path.rstrip("*") for path in told} == {path.rstrip("*") for path in there}
    assert [code for code in get_args(Code) if f"`{code}`" not in text] == []
