"""A server as a child process with a log file, and waiting until it answers."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

#: Below those that Linux gives to outgoing connections: one of these may take a port while its server is restarted.
_PORTS = range(12_000, 32_000)
#: How a program ends that crashes; its log is printed then, and so many of its lines.
_CRASHED = {-signal.SIGABRT, -signal.SIGBUS, -signal.SIGILL, -signal.SIGSEGV}
_LAST_LINES = 60


def free_port() -> int:
    """Return a loopback port that nothing listens on, and that nobody else is given while this process lives."""
    for port in random.SystemRandom().sample(_PORTS, 1_000):
        if reserve(port):
            return port
    raise RuntimeError(f"no free port between {_PORTS.start} and {_PORTS.stop}")


def reserve(port: int) -> bool:
    """Take a port for this process, and return whether it could: others may have it, and not listen on it yet."""
    if port not in _PORTS:
        return False
    # a name that is there until the process ends, however it ends
    mine = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        mine.bind(f"\0airflow-delayed/port/{port}")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
    except OSError:
        mine.close()
        return False
    mine.detach()
    return True


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


def ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process has ended. Unlike poll() it leaves the process's number taken, which stop() relies on."""
    if process.returncode is not None:
        return True
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def wait(process: subprocess.Popen[bytes], *, seconds: float) -> bool:
    """Wait for a process to end, and return whether it did."""
    deadline = time.monotonic() + seconds
    while not ended(process) and time.monotonic() < deadline:
        time.sleep(0.02)
    return ended(process)


def signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a process and its whole group, unless poll() or wait() has seen its end.

    Its number may be given to another's process then, such as the server of a test run beside this one.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def stop(process: subprocess.Popen[bytes], *, seconds: float = 15) -> None:
    """End a process and its whole group: TERM first, KILL if it does not go."""
    signal_group(process, signal.SIGTERM)
    wait(process, seconds=seconds)
    signal_group(process, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def running(
    command: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    user: str | None = None,
    within: Sequence[str] = (),
    farewell: str = "TERM",
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server in a process group of its own until the block ends; its output goes to the log.

    It gets a signal also when this process is killed before that. Linux sends that signal when the thread ends that
    has started the server, so only the main thread may start one.

    :param user: as whom it runs, if this process is root's.
    :param within: the beginning of a command that only root may run, such as ``ip netns exec NAME``.
    :param farewell: that signal.
    :raises RuntimeError: another thread has called this.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("a server started by another thread than the main one would not end with this process")
    with log.open("ab") as output:
        process = subprocess.Popen(
            # the kernel forgets that signal when the user changes, so it comes after that
            [*within, *as_user(user), "setpriv", "--pdeathsig", farewell, *command],
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
        if process.returncode in _CRASHED:
            last = "\n".join(log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
            print(f"{command[0]} crashed ({process.returncode}); the end of its log:\n{last}", file=sys.stderr)


def as_user(user: str | None) -> list[str]:
    """Return a command's beginning by which root runs it as another user: databases and brokers refuse to be root's."""
    if user is None or os.geteuid() != 0:
        return []
    return ["setpriv", "--reuid", user, "--regid", user, "--clear-groups"]
