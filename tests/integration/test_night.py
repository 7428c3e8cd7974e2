"""A tenth of the night of ten million: nothing lost, twice or early, and no process that grows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.lengths import TABLES

NIGHT = Path(__file__).parents[2] / "benchmarks" / "night.py"


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_million_messages_of_a_spark_job_arrive_once_and_none_early() -> None:
    command = [sys.executable, str(NIGHT), "--messages", "1000000", "--way", "spark"]
    night = subprocess.run(command, capture_output=True, text=True, check=False)
    TABLES["a night of 1,000,000 messages"] = night.stdout.splitlines()
    assert night.returncode == 0, night.stdout + night.stderr
