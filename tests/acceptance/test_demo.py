"""`make demo`: what it says at the end is true, and it leaves nothing running."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from reckoning import Consumer, computed, reckon

# a minute, and more beside other work
pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
DEMO = [sys.executable, str(Path(__file__).resolve().parents[2] / ".ci" / "demo.py"), "--folder"]


def test_the_demo_ends_with_every_reminder_on_time(tmp_path: Path) -> None:
    done = subprocess.run([*DEMO, str(tmp_path / "demo")], capture_output=True, text=True, check=False)
    log = tmp_path / "demo/airflow.log"
    assert done.returncode == 0, done.stdout + done.stderr + (log.read_text()[-3000:] if log.exists() else "")

    [run] = (tmp_path / "demo/reminders").iterdir()
    due = computed(run / "reminders")
    result = reckon(due, Consumer(tmp_path / "demo/flight-reminders.arrivals.jsonl").arrivals())
    assert result.computed == result.arrived > 600
    assert (result.early, result.missing, result.strange) == (0, 0, 0)
    summary = json.loads((tmp_path / "demo/summary.json").read_text())
    assert summary["sent"] + summary["stored"] == result.computed
    for line in (f"reminders computed {result.computed:>9,}", "early 0", "missing 0", f"arrived {result.arrived:,}"):
        assert " ".join(line.split()) in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    "stage, asked",
    [
        # the emulator starts
        ("SQS emulator,", signal.SIGINT),
        # and Airflow, and soon Spark
        pytest.param("SparkSubmitOperator", signal.SIGTERM, marks=pytest.mark.long),
    ],
)
def test_the_demo_stops_what_it_started(tmp_path: Path, stage: str, asked: signal.Signals) -> None:
    demo = subprocess.Popen([*DEMO, str(tmp_path / "demo")], stdout=subprocess.PIPE, text=True)
    try:
        assert demo.stdout is not None
        for line in demo.stdout:
            if stage in line:
                break
        time.sleep(2)
        deadline = time.monotonic() + 60
        while not (started := psutil.Process(demo.pid).children(recursive=True)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert started
        demo.send_signal(asked)
        assert demo.wait(120) == 130
    finally:
        demo.kill()
        demo.wait()
        if demo.stdout is not None:
            demo.stdout.close()
    _, alive = psutil.wait_procs(started, timeout=60)
    assert [process.cmdline() for process in alive] == []
