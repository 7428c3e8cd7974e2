"""docs/operations/monitoring: the alert rules by promtool, and the dashboard by Grafana's own models of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from airflow.configuration import conf
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from support import pages

from services import prometheus

pytestmark = pytest.mark.long

CASES = Path(__file__).with_name("alerts_test.yml")


def promtool(*words: str | Path) -> None:
    prometheus.require()
    done = subprocess.run([prometheus.PROMTOOL, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def folder(here: Path) -> Path:
    return here / "docs/operations/monitoring"


def alerts(folder: Path) -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load((folder / "alerts.yml").read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def test_prometheus_reads_the_alert_rules(folder: Path):
    promtool("check", "rules", folder / "alerts.yml")


def test_each_alert_fires_and_is_silent(folder: Path):
    cases = [case for test in yaml.safe_load(CASES.read_text())["tests"] for case in test["alert_rule_test"]]
    for fires in (True, False):
        assert {case["alertname"] for case in cases if bool(case["exp_alerts"]) == fires} == alerts(folder).keys()
    promtool("test", "rules", CASES)


def test_the_page_explains_each_alert(folder: Path):
    page = folder.with_suffix(".md").read_text()
    assert set(re.findall(r"^\| `(Delayed\w+)` \|", page, re.MULTILINE)) == alerts(folder).keys()


def test_each_alert_leads_to_a_section_of_the_runbook(folder: Path):
    text = (folder.parent / "troubleshooting.md").read_text()
    headings = {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }
    for name, rule in alerts(folder).items():
        page, _, section = rule["annotations"]["runbook_url"].partition("#")
        assert page.endswith("/docs/operations/troubleshooting.html"), name
        assert section in headings, name


def test_the_pages_settings_are_read_by_prometheus_and_known_to_airflow(folder: Path, tmp_path: Path):
    texts = dict(pages.blocks(folder.with_suffix(".md")))
    file = tmp_path / "prometheus.yml"
    file.write_text(texts["yaml"])
    shutil.copy(folder / "alerts.yml", tmp_path)
    promtool("check", "config", file)
    settings = ConfigParser()
    settings.read_string(texts["ini"])
    assert all(conf.has_option("metrics", name) for name in settings["metrics"])


def test_grafana_knows_each_field_of_the_dashboard(folder: Path):
    register_default_plugins()
    wanted = json.loads((folder / "grafana-dashboard.json").read_text())
    known = json.loads(JSONEncoder().encode(Dashboard.from_json(wanted)))
    assert lost(wanted, known) == []
    # what the models do not say: a number for each panel, and no two panels at one place
    numbers = [panel["id"] for panel in wanted["panels"]]
    assert len(set(numbers)) == len(numbers)
    cells: set[tuple[int, int]] = set()
    for panel in wanted["panels"]:
        place = panel["gridPos"]
        columns, lines = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        own = {(column, line) for column in columns for line in lines}
        assert max(columns) < 24
        assert not own & cells
        cells |= own


def lost(wanted: object, known: object, path: str = "") -> list[str]:
    """The places where Grafana's models have lost or changed a value: they leave out a field that they do not know."""
    if isinstance(wanted, dict) and isinstance(known, dict):
        return [place for name, value in wanted.items() for place in lost(value, known.get(name), f"{path}.{name}")]
    if isinstance(wanted, list) and isinstance(known, list) and len(wanted) == len(known):
        pairs = enumerate(zip(wanted, known, strict=True))
        return [place for number, pair in pairs for place in lost(*pair, f"{path}[{number}]")]
    return [] if wanted == known else [path]
