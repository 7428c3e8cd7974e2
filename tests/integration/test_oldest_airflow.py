"""The oldest Airflow that is served, on the oldest Python, in .venv/oldest, where .ci/setup puts it.

It imports, parses and runs DAGs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import release

from services import sqs

pytestmark = pytest.mark.long

OLDEST = Path(sys.prefix, "oldest/bin/python")
#: What is not installed there.
ABSENT = ("No module named 'pyarrow'", "No module named 'pytest'", "No module named 'pyspark'", "delayed[spark]'")
DONE = "success"
NOT_HERE = f"this machine has no Python {release.OLDEST}, which the metadata promise; make release-check fails on that"


@pytest.fixture
def ask(here: Path, tmp_path: Path, sqs_endpoint: str) -> Callable[[str], tuple[dict[str, Any], str]]:
    """Let the oldest Airflow answer a question of support/oldest.py; returns the answer and what was logged."""

    def run(question: str) -> tuple[dict[str, Any], str]:
        assert OLDEST.exists(), "run `make setup`, which installs it there"
        (tmp_path / "dags").mkdir()
        connections = {
            "db": {"conn_type": "sqlite", "host": str(tmp_path / "db.sqlite")},
            "db2": {"conn_type": "sqlite", "host": str(tmp_path / "db2.sqlite")},
            "sqs": sqs.connection(sqs_endpoint, queue_name_prefix=f"oldest-{uuid.uuid4().hex[:8]}-"),
        }
        done = subprocess.run(
            [OLDEST, here / "tests/support/oldest.py", here, tmp_path / "result.json", question],
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW")},
                "AIRFLOW_HOME": str(tmp_path),
                "PYTHONPATH": str(here),
                "AIRFLOW__CORE__DAGS_FOLDER": str(tmp_path / "dags"),
                "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
                "AIRFLOW__DATABASE__LOAD_DEFAULT_CONNECTIONS": "False",
                **{f"AIRFLOW_CONN_{name.upper()}": json.dumps(fields) for name, fields in connections.items()},
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-5000:]
        return json.loads((tmp_path / "result.json").read_text())[question], done.stdout + done.stderr

    return run


def test_what_can_be_runs_and_what_cannot_says_what_it_needs(ask) -> None:
    found, _ = ask("what is there")
    assert found["airflow"].startswith("3.1.")
    assert found["type"] == "airflow_delayed.hooks.rabbitmq.RabbitMQDelayHook"

    needs = {name: text for name, text in found["modules"].items() if not any(one in text for one in ABSENT)}
    assert needs == {}
    assert found["dags"].keys() == {"dispatch_store"}
    assert "DeadlineAlert" in found["dags"].pop("dispatch_store"), "as its docstring says, it needs Airflow 3.2"

    states, results = found["into a queue table"]
    assert states == {"install_db": DONE, "send": DONE, "dispatch": DONE}
    assert (results["send"]["stored"], results["dispatch"]["dispatched"]) == (3, 2)
    assert found["left in db"] == 1
    assert found["rendered"] == ("20260605T073000 2026-06-04 01:00:00+00:00 2026-06-06 1 default run-1 render"), (
        "delayed.run of the fixture has Airflow's context"
    )
    # what was asserted until here holds on any Python
    if found["python"] != release.OLDEST:
        pytest.skip(f"it ran on Python {found['python']}: {NOT_HERE}")


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_the_unit_tests_on_the_oldest_python(here: Path) -> None:
    python = next(release.interpreters(release.OLDEST), None)
    if python is None:
        pytest.skip(NOT_HERE)
    release.FOLDER.mkdir(parents=True, exist_ok=True)
    print(release.unit_tests(f"units-{release.OLDEST}", python, here))


@pytest.mark.long
def test_sqs_in_the_triggerer_and_a_task_that_is_tried_again(ask) -> None:
    found, logged = ask("how DAGs run")
    states, results = found["into SQS, in the triggerer"]
    assert states == {"install_sqs": DONE, "install_db2": DONE, "send": DONE, "dispatch": DONE}
    assert (results["send"]["sent"], results["send"]["stored"], results["dispatch"]["dispatched"]) == (1, 2, 1)
    assert found["left in db2"] == 1

    # a delay that would count anew is refused on a later try; what has a due time of its own is the same message
    states, results = found["again"]
    assert states == {"relative": "failed", "absolute": DONE}
    assert (results["absolute"]["stored"], results["absolute"]["duplicates"]) == (0, 1)
    assert found["left in db after that"] == found["left in db before that"] + 2
    assert "Airflow before 3.3 does not keep it" in logged
