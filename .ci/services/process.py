"""A server as a child process with a log file, and waiting until it answers."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path


def free_port() -> int:
    """Return a loopback port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(what: str, ready: Callable[[], object], *, seconds: float = 60, log: Path | None = None) -> None:
    """Wait until ready() is true and raises nothing; on time-out show the end of the log."""
    deadline = time.monotonic() + seconds
    problem: object = "not ready"
    while time.monotonic() < deadline:
        try:
            if ready():
                return
        except Exception as error:
            problem = error
        time.sleep(0.1)
    tail = f"\n{log.read_text(errors='replace')[-3000:]}" if log and log.exists() else ""
    raise RuntimeError(f"{what} did not come up within {seconds:.0f} s: {problem}{tail}")


def stop(process: subprocess.Popen[bytes], *, seconds: float = 15) -> None:
    """End a process and its whole group: TERM first, KILL if it does not go."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def running(
    command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server in a process group of its own until the block ends; its output goes to the log."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            cwd=cwd,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        stop(process)
