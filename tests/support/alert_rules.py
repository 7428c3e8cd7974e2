"""What the alert rules make of metrics, by promtool: texts of ``/metrics``, each scraped once a minute for a while."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from services import prometheus

RULES = Path(__file__).parents[2] / "docs/operations/monitoring/alerts.yml"
#: Names of what only grows.
_COUNTERS = ("_total", "_bucket", "_count", "_sum")
#: The labels of an alert that name its cause.
_NAMED = ("alertname", "code", "store_conn_id", "conn_id")

#: Minutes, and what is scraped in them.
Phase = tuple[int, str]


def samples(text: str) -> dict[str, float]:
    """The value of each series of a text."""
    families = text_string_to_metric_families(text)
    return {key(one.name, one.labels): one.value for family in families for one in family.samples}


def labels(text: str, name: str) -> list[dict[str, str]]:
    """The labels of each sample of a metric."""
    families = text_string_to_metric_families(text)
    return [dict(one.labels) for family in families for one in family.samples if one.name == name]


def key(name: str, labels: Mapping[str, str]) -> str:
    """A series as PromQL writes it; a label without a value is none."""
    return f"{name}{{{', '.join(f'{label}={json.dumps(value)}' for label, value in sorted(labels.items()) if value)}}}"


def promtool(*words: str | Path) -> None:
    prometheus.require()
    done = subprocess.run([prometheus.PROMTOOL, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def check(folder: Path, phases: Sequence[Phase], alerts: Mapping[int, Mapping[str, str]], *, every: int = 1) -> None:
    """Check which alerts fire, each minute or every so many minutes: then with what fired since the last check.

    :param folder: for promtool's file.
    :param alerts: the alert that fires in a minute, by the labels that are not empty; in other minutes none does.
    """
    file = folder / "alerts.json"
    by = ", ".join(_NAMED)
    expected = [
        {
            "expr": f'count by ({by}) (max_over_time(ALERTS{{alertstate="firing"}}[{60 * every - 1}s]))',
            "eval_time": f"{minute}m",
            "exp_samples": [{"labels": key("", alerts[minute]), "value": 1}] if minute in alerts else [],
        }
        for minute in range(0, sum(minutes for minutes, _ in phases), every)
    ]
    test = {"interval": "1m", "input_series": _series(phases), "promql_expr_test": expected}
    # YAML can be written as JSON
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}))
    promtool("test", "rules", file)


def _series(phases: Sequence[Phase]) -> list[dict[str, str]]:
    scraped = [(minutes, samples(text)) for minutes, text in phases]
    found = []
    for name in dict.fromkeys(name for _, values in scraped for name in values):
        grows = name.partition("{")[0].endswith(_COUNTERS)
        parts: list[str] = []
        before: float | None = None
        for minutes, values in scraped:
            value = values.get(name)
            if value is None:
                parts.append("stale" if before is not None else "_")
                parts += [f"_x{minutes - 1}"] if minutes > 1 else []
            else:
                begin = value if before is None or not grows else min(before, value)
                parts.append(f"{begin!r}+{(value - begin) / minutes!r}x{minutes - 1}")
            before = value
        found.append({"series": name, "values": " ".join(parts)})
    return found
