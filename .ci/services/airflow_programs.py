"""Airflow's programs as forks of one process that has imported Airflow, which is the larger part of their start.

    python airflow_programs.py SOCKET

listens at a Unix socket for its one client, the class Programs. An order is a line of JSON, and so is its answer:
{"argv": [...], "env": {...}, "log": "..."} starts a program in a session of its own and tells its number;
{"wait": number} tells how that ended, and gives the number away. What runs is ended when the client goes.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
#: What Airflow's parts and most tasks of the examples import; nothing that starts a thread, which forks would lack.
_IMPORTED = (
    "airflow.api_fastapi.app",
    "airflow.dag_processing.processor",
    "airflow.jobs.dag_processor_job_runner",
    "airflow.jobs.scheduler_job_runner",
    "airflow.jobs.triggerer_job_runner",
    "airflow.sdk.execution_time.task_runner",
    "airflow.utils.db",
    "airflow.providers.apache.spark.operators.spark_submit",
    "airflow_delayed.hooks.rabbitmq",
    "airflow_delayed.hooks.sqs",
    "airflow_delayed.hooks.store",
    "airflow_delayed.operators.dispatch",
    "airflow_delayed.operators.send",
    "airflow_delayed.operators.topology",
)


class Program:
    """A program that runs; its number, and that of its group, are its own until ``stop`` or ``wait`` returns."""

    def __init__(self, programs: Programs, pid: int) -> None:
        self.pid = pid
        #: How it ended, once that was waited for.
        self.code: int | None = None
        self._programs = programs
        self._handle = os.pidfd_open(pid)

    def ended(self, *, seconds: float = 0) -> bool:
        """Whether it has ended, or does so in time."""
        return self.code is not None or bool(select.select([self._handle], [], [], seconds)[0])

    def signal(self, number: signal.Signals, *, group: bool = False) -> None:
        """Send it a signal, or its whole group."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if group else os.kill)(self.pid, number)

    def stop(self, *, seconds: float = 15) -> None:
        """End it and its group: TERM first, KILL if it does not go."""
        self.signal(signal.SIGTERM, group=True)
        self.ended(seconds=seconds)
        self.kill()

    def kill(self) -> None:
        """End it and its children at once, as kill -9 does."""
        self.signal(signal.SIGKILL, group=True)
        self.wait()

    def wait(self) -> int:
        """Wait for its end, and return its exit code; negative is the signal that ended it."""
        if self.code is None:
            self.code = int(self._programs.ask(wait=self.pid))
            os.close(self._handle)
        return self.code


class Programs:
    """Starts programs."""

    def __init__(self, connection: socket.socket) -> None:
        self._lines = connection.makefile("rw")

    def start(self, argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> Program:
        """Start a program: "airflow" with its arguments, or a Python script with its own.

        :param env: what is added to the environment.
        """
        return Program(self, self.ask(argv=list(argv), log=str(log), env=dict(env or {})))

    def ask(self, **order: object) -> Any:
        """Give an order, and return the answer."""
        self._lines.write(json.dumps(order) + "\n")
        self._lines.flush()
        answer = self._lines.readline()
        if not answer:
            raise RuntimeError("the process that starts Airflow's programs has ended")
        return json.loads(answer)


@contextlib.contextmanager
def running(env: Mapping[str, str], folder: Path, hide: Sequence[str] = ()) -> Iterator[Programs]:
    """Have programs started with this environment until the block ends, which ends them.

    :param hide: the beginning of a command that hides variables of this process's own environment.
    """
    # this module needs nothing of the package for itself
    from services import process

    log = folder / "programs.log"
    with contextlib.ExitStack() as stack:
        # a short name: the kernel takes about a hundred letters
        at = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="airflow-"))) / "socket"
        command = [*hide, sys.executable, str(Path(__file__).resolve()), str(at)]
        child = stack.enter_context(process.running(command, log=log, env=env))
        connection = stack.enter_context(socket.socket(socket.AF_UNIX))

        def connected() -> bool:
            connection.connect(str(at))
            return True

        process.wait_for("Airflow's programs", connected, seconds=240, log=log)
        try:
            yield Programs(connection)
        finally:
            # by which it knows that nobody wants its programs any more
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            process.wait(child, seconds=30)


def _serve(connection: socket.socket) -> list[str]:
    """Fork as the client wants until it goes; only a fork returns from this, with the program that it is to be."""
    children: set[int] = set()
    with connection.makefile("rw") as lines:
        for line in iter(lines.readline, ""):
            order = json.loads(line)
            if "wait" in order:
                answer = os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1])
                children.discard(order["wait"])
            else:
                sys.stdout.flush()
                sys.stderr.flush()
                answer = os.fork()
                if not answer:
                    _become(order)
                    return list(order["argv"])
                children.add(answer)
            lines.write(json.dumps(answer) + "\n")
            lines.flush()
    _end(children)
    raise SystemExit


def _become(order: Mapping[str, Any]) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.update(order["env"])
    # forks of one process would all choose the same
    random.seed()


def _end(children: set[int]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + 10
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, number)
        while children and time.monotonic() < deadline:
            children -= {child for child in children if os.waitpid(child, os.WNOHANG)[0]}
            time.sleep(0.02)


def main() -> None:
    # beside this file is another that is called airflow
    sys.path[:] = [place for place in sys.path if Path(place).resolve() != Path(__file__).resolve().parent]
    for name in _IMPORTED:
        importlib.import_module(name)

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(sys.argv[1])
        listening.listen(1)
        connection = listening.accept()[0]
    argv = _serve(connection)
    # the client sees the end of the process that forks, though its forks live on
    connection.close()
    sys.argv = argv
    if argv[0] == "airflow":
        from airflow.__main__ import main as program

        program()
    else:
        sys.path.insert(0, str(Path(argv[0]).parent))
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
