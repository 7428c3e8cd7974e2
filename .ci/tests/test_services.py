"""The servers of the tests: each ends with who started it, and no other does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.rabbitmq import eventually

from services import process

STAYS = [sys.executable, "-c", "import time; time.sleep(600)"]
STARTS = """
import sys, time
from pathlib import Path
from services import process

log, user, *command = sys.argv[1:]
with process.running(command, log=Path(log), user=user or None) as server:
    print(server.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("user", ["", "daemon"], ids=["its own user", "another user"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_ends_with_who_started_it_however_that_ends(tmp_path: Path, here: Path, user: str, how: int) -> None:
    command = ["sleep", "600"]
    arguments = [sys.executable, "-c", STARTS, str(tmp_path / "log"), user, *command]
    env = {**os.environ, "PYTHONPATH": str(here / ".ci")}
    with subprocess.Popen(arguments, env=env, stdout=subprocess.PIPE, text=True) as starter:
        try:
            server = int(starter.stdout.readline())
            eventually(lambda: running(server) == command)
        finally:
            starter.send_signal(how)
    eventually(lambda: running(server) == [])


def test_another_thread_starts_no_server_for_it_would_stay(tmp_path: Path) -> None:
    def start() -> None:
        with process.running(STAYS, log=tmp_path / "log"):
            pass

    with ThreadPoolExecutor() as threads, pytest.raises(RuntimeError, match="would not end with this process"):
        threads.submit(start).result()


def test_a_number_that_was_given_to_another_is_left_alone(tmp_path: Path) -> None:
    """As when a server was killed and seen to end, long before its block ends."""
    with process.running(STAYS, log=tmp_path / "log") as other:
        gone = subprocess.Popen(["true"], start_new_session=True)
        gone.wait()
        gone.pid = other.pid
        process.signal_group(gone, signal.SIGKILL)
        process.stop(gone)
        assert not process.ended(other)


def test_the_group_of_a_server_that_has_ended_ends_too(tmp_path: Path) -> None:
    leaves = ["sh", "-c", "sleep 600 & echo $!"]
    with process.running(leaves, log=tmp_path / "log") as server:
        assert process.wait(server, seconds=120)
        left = int((tmp_path / "log").read_text())
        # a process that is just beginning has no command yet
        eventually(lambda: running(left))
    eventually(lambda: running(left) == [])


def running(pid: int) -> list[str]:
    """The command that runs under a number; none when it has ended."""
    try:
        return Path("/proc", str(pid), "cmdline").read_text().split("\0")[:-1]
    except FileNotFoundError:
        return []
