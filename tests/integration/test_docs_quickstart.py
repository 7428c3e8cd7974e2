"""docs/start/quickstart.md is run as it stands, from an empty Airflow: an empty folder is its home."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from support import pages

PAGE = Path(__file__).resolve().parents[2] / "docs/start/quickstart.md"


def test_from_an_empty_airflow_to_a_message_that_arrived(
    here: Path, tmp_path: Path, connect: Callable[..., str]
) -> None:
    clone, home = tmp_path / "clone", tmp_path / "airflow"
    (clone / "dags").mkdir(parents=True)
    dag = (here / "dags/quickstart.py").read_text()
    # no test waits for what a user would
    (clone / "dags/quickstart.py").write_text(dag.replace("delay=10", "delay=1"))
    store = tmp_path / "delayed.db"
    shell = "".join(text for language, text in pages.blocks(PAGE) if language == "bash")
    shell = shell.replace("/tmp/delayed.db", str(store))
    # of this process's Airflow it gets nothing
    env = {name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW")}
    env.update(AIRFLOW_HOME=str(home), PYTHONPATH=str(here))
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    # what is the same for all DAGs is done once
    for script in (shell, shell.replace("airflow db migrate\n", "")):
        ran = subprocess.run(
            ["bash", "-eu"], input=script, cwd=clone, env=env, capture_output=True, text=True, check=False
        )
        log = home / "quickstart.log"
        assert ran.returncode == 0, ran.stderr + (log.read_text()[-5000:] if log.exists() else "")
        stored, dispatched, arrived = ran.stdout.splitlines()[-3:]
        assert "confirmed: 0 sent, 1 stored" in stored
        assert "store 'delayed_store': 1 messages dispatched (delayed_store: 1), due from 20" in dispatched
        assert arrived == "arrived: [('Hello!',)]"
        # nothing that git would show
        assert [path.name for path in clone.iterdir()] == ["dags"]

    connect("delayed_store", conn_type="sqlite", host=str(store))
    for _ in ("the first run", "the same again"):
        assert len(list(pages.run(PAGE))) == 2


def test_the_dag_is_the_whole_file(here: Path) -> None:
    (dag, _) = (text for language, text in pages.blocks(PAGE) if language == "python")
    assert dag == (here / "dags/quickstart.py").read_text()


def test_each_command_in_a_sentence_is_one() -> None:
    from airflow.cli import cli_parser

    commands = re.findall(r"`airflow (delayed [^`]+)`", PAGE.read_text())
    assert len(commands) == 2
    for command in commands:
        assert cli_parser.get_parser().parse_args(command.split()).store_conn_id == "delayed_store"
