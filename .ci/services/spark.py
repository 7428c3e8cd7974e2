"""A private standalone Spark: a master and its workers on this machine, on free ports of loopback."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from services import java, process

_MASTER = "org.apache.spark.deploy.master.Master"
_WORKER = "org.apache.spark.deploy.worker.Worker"
#: What the command line of an executor has.
_EXECUTOR = "CoarseGrainedExecutorBackend"
#: What a worker writes into its log when its master knows it.
_REGISTERED = "Successfully registered with master"
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Cluster:
    """A running cluster.

    :param url: what applications have as their master.
    """

    url: str
    workers: tuple[subprocess.Popen[bytes], ...]

    def executors(self) -> list[int]:
        """Return the process ids of the executors that run."""
        found = []
        for worker in self.workers:
            for pid in _descendants(worker.pid):
                with contextlib.suppress(OSError):
                    if _EXECUTOR in Path(f"/proc/{pid}/cmdline").read_text():
                        found.append(pid)
        return found

    def kill_executor(self) -> int:
        """Kill one executor without a warning, and return its process id."""
        pid = self.executors()[0]
        os.kill(pid, signal.SIGKILL)
        return pid


@contextlib.contextmanager
def running(*, workers: int = 2, cores: int = 2, memory: str = "1g", env: Mapping[str, str]) -> Iterator[Cluster]:
    """Run a cluster until the block ends.

    :param memory: of a worker, for its executors.
    :param env: the workers' environment, which executors inherit.
    """
    java.require()
    found = find_spec("pyspark")
    assert found is not None
    assert found.submodule_search_locations is not None
    home = Path(found.submodule_search_locations[0])
    folder = Path(tempfile.mkdtemp(prefix="delayed-spark-"))
    settings = {
        **env,
        "SPARK_HOME": str(home),
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_LOCAL_DIRS": str(folder / "local"),
        "SPARK_CONF_DIR": str(folder),
    }
    port = process.free_port()
    url = f"spark://{_LOOPBACK}:{port}"
    program = str(home / "bin/spark-class")
    try:
        with contextlib.ExitStack() as stack:

            def start(name: str, host: str, *command: str) -> subprocess.Popen[bytes]:
                log, environ = folder / f"{name}.log", {**settings, "SPARK_LOCAL_IP": host}
                return stack.enter_context(process.running([program, *command], log=log, env=environ, cwd=folder))

            ui = ("--webui-port", str(process.free_port()))
            start("master", _LOOPBACK, _MASTER, "--host", _LOOPBACK, "--port", str(port), *ui)
            started = []
            for number in range(workers):
                # each on a loopback address of its own: a straggler's copy is never run on the straggler's host
                host = f"127.0.0.{number + 1}"
                command = [_WORKER, "--host", host, "--port", str(process.free_port())]
                command += ["--webui-port", str(process.free_port()), "--cores", str(cores), "--memory", memory]
                command += ["--work-dir", str(folder / f"work{number}"), url]
                started.append(start(f"worker{number}", host, *command))
            for number in range(workers):
                log = folder / f"worker{number}.log"
                process.wait_for("Spark", lambda log=log: _REGISTERED in log.read_text(), seconds=180, log=log)
            yield Cluster(url, tuple(started))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _descendants(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *_descendants(int(child))]
    return found
