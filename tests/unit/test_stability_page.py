"""docs/development/stability.md: what it names is there, and nothing that Airflow offers users is missing."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from airflow_delayed.provider_info import get_provider_info

PAGE = Path(__file__).resolve().parents[2] / "docs/development/stability.md"


def paths(title: str) -> list[str]:
    """The paths in the tables of a section."""
    section = PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = "\n".join(line for line in section.splitlines() if line.startswith("|"))
    return re.findall(r"`(airflow_delayed\.[a-z_.]+\.[A-Za-z_0-9.]+)`", rows)


STABLE, EXPERIMENTAL = paths("Stable"), paths("Experimental")


def named(path: str) -> Any:
    parts = path.split(".")
    # a method stands behind its class
    length = next((n for n, part in enumerate(parts) if part[0].isupper()), len(parts) - 1)
    found: Any = import_module(".".join(parts[:length]))
    for part in parts[length:]:
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("path", STABLE)
def test_what_is_stable_can_be_imported_and_says_what_it_is(path):
    assert named(path).__doc__
    assert "Experimental" not in named(path).__doc__


@pytest.mark.parametrize("path", EXPERIMENTAL)
def test_what_is_experimental_says_so(path):
    found = named(path)
    if path.rpartition(".")[2].isupper():
        source = Path(import_module(path.rpartition(".")[0]).__file__ or "").read_text()
        comment = re.search(rf"((?:#:.*\n)+){path.rpartition('.')[2]} = ", source)
        assert comment is not None
        assert "Experimental" in comment[1]
    else:
        assert "Experimental: " in found.__doc__


def test_each_class_that_a_dag_can_use_is_on_the_page():
    info = get_provider_info()
    kinds = ("operators", "sensors", "hooks", "triggers")
    modules = {module for kind in kinds for group in info[kind] for module in group["python-modules"]}
    listed = {path.rpartition(".")[0] for path in STABLE + EXPERIMENTAL}
    # an operator or a sensor defers to these by itself
    deferred = ("store_dispatch", "fifo_cycle")
    assert modules - listed == {f"airflow_delayed.triggers.{name}" for name in deferred}
    assert set(info["notifications"]) <= set(STABLE)
    assert {one["class-name"] for one in info["task-decorators"]} <= set(STABLE)
