"""The servers of a test run: one RabbitMQ, PostgreSQL, MariaDB and SQS, or the user's own, whatever the processes.

A run of several processes (pytest-xdist) has one set, which its controller starts while the workers collect their
tests, and stops at the end. A run of one process starts what its tests ask for.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

#: By name: the environment variable by which a user names a server, and seconds that a start may take with its
#: installation.
SERVERS = {"rabbitmq": "RABBITMQ_URL", "postgres": "POSTGRES_URL", "mariadb": "MARIADB_URL", "sqs": "SQS_ENDPOINT"}
_START_SECONDS = 900
_FOLDER = "servers_folder"


def start(name: str) -> AbstractContextManager[Any]:
    """Return a private server that runs until its block ends."""
    from services import mariadb, postgres, rabbitmq, sqs

    starters: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "rabbitmq": rabbitmq.running,
        "postgres": postgres.running,
        "mariadb": mariadb.running,
        "sqs": sqs.running,
    }
    return starters[name]()


@contextlib.contextmanager
def url_of(name: str, config: pytest.Config) -> Iterator[str]:
    """Yield the URL of a server: the user's, that of the whole run, or one that runs until the block ends."""
    if url := os.environ.get(SERVERS[name]):
        yield url
    elif folder := shared_folder(config):
        yield _wait_for(folder / name)
    else:
        with start(name) as server:
            yield server.url


def shared_folder(config: pytest.Config) -> Path | None:
    """Return the folder that the workers of a run share; None where the run has one process."""
    found = getattr(config, "workerinput", {}).get(_FOLDER)
    return Path(found) if found else None


def _wait_for(file: Path) -> str:
    deadline = time.monotonic() + _START_SECONDS
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the run's {file.name} has not been started after {_START_SECONDS} s")
        time.sleep(0.1)
    answer = json.loads(file.read_text())
    if "problem" in answer:
        raise RuntimeError(f"the run's {file.name} could not be started: {answer['problem']}")
    return str(answer["url"])


class Controller:
    """Starts the servers of a run of several processes, as a plugin of its controller."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="airflow-delayed-servers-"))
        self._running = contextlib.ExitStack()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[_FOLDER] = str(self.folder)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Start what a user has not given; the workers have been started before this."""
        if session.config.args == ["tests/unit"]:
            # they need none
            return
        for name, variable in SERVERS.items():
            if variable not in os.environ:
                self._start(name)

    def _start(self, name: str) -> None:
        try:
            answer = {"url": self._running.enter_context(start(name)).url}
        # what cannot be installed ends a program that needs it; here it fails the tests that need it
        except (Exception, SystemExit) as error:
            answer = {"problem": str(error)}
        # written elsewhere and moved, so that nobody reads half of it
        (self.folder / f"{name}.new").write_text(json.dumps(answer))
        (self.folder / f"{name}.new").rename(self.folder / name)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        self._running.close()
        shutil.rmtree(self.folder, ignore_errors=True)
