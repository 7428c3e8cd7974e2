"""The how-to pages name every code of a finding, every extra and every topology; their links lead somewhere."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from airflow_delayed.provider_info import get_provider_info
from airflow_delayed.rabbitmq.connection import EXTRAS
from airflow_delayed.rabbitmq.topology import TOPOLOGIES

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted((ROOT / "docs").glob("**/*.md"))


def page(name: str) -> str:
    return (ROOT / "docs" / "rabbitmq" / f"{name}.md").read_text()


def section(text: str, heading: str) -> str:
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def first_cells(text: str) -> set[str]:
    """What stands in backticks in the first cell of each row of the tables."""
    return {name for row in re.findall(r"^\|([^|]*)\|", text, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)}


def codes() -> set[str]:
    """Every code that a finding of this package can have, read from its source."""
    found: set[str] = set()
    for path in (ROOT / "airflow_delayed" / "rabbitmq").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                arguments = [each.value for each in node.keywords if each.arg == "code"]
                arguments += node.args[:1] if node.func.id in ("unknown", "warning") else []
                found |= {each.value for each in arguments if isinstance(each, ast.Constant)}
            # those of what AMQP tells
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "codes":
                found |= set(re.findall(r"'([a-z-]+)'", ast.unparse(node.value)))
    return found


def test_every_code_of_a_finding_has_a_heading_and_every_heading_a_code() -> None:
    headings = re.findall(r"^### (.+)$", section(page("verify"), "Findings by code"), re.MULTILINE)
    assert {"missing", "differs", "stuck", "version"} < codes()
    assert sorted(headings) == sorted({*codes(), "unknown"})


def test_every_extra_is_in_the_table_and_no_other() -> None:
    (fields,) = (each["conn-fields"] for each in get_provider_info()["connection-types"])
    text = section(page("install"), "The connection").partition("| extra |")[2].partition("\n\n")[0]
    assert first_cells(text) == set(fields) == set(EXTRAS)
    for block in re.findall(r"```json\n(.*?)```", page("install"), re.DOTALL):
        assert set(json.loads(block)["extra"]) <= set(fields)


def test_every_topology_is_in_the_table() -> None:
    text = section(page("install"), "Choosing a topology").partition("\n\n### ")[0]
    rows = {row.split("`")[1]: row for row in text.splitlines() if re.match(r"\| `[a-z0-9-]+` \| `", row)}
    assert set(rows) == set(TOPOLOGIES)
    for name, topology in TOPOLOGIES.items():
        assert f"`{topology.level_name(0)}`" in rows[name]
        assert f"`{topology.delivery_exchange}`" in rows[name]
        assert ("quorum, at-least-once" in rows[name]) == (topology.quorum)
        assert ("| directly |" in rows[name]) == (not topology.shared)


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if not link.startswith("https://"):
            name, _, anchor = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link
