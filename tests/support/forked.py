"""Processes that a test kills, forked by a server that has imported what they need.

A fresh interpreter would import Airflow first, which takes longer than what most of them do.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.forkserver import ensure_running
from typing import Any

import pytest

#: Seconds that an answer may take on a slow machine.
PATIENCE = 120
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "support.consuming",
        "support.dispatching",
        "support.pausing",
        "support.staying",
        "support.serving",
        "support.sqs_processes",
    ]
)


class Child:
    """A process that calls a function, with a pipe to here as its first argument."""

    def __init__(self, work: Callable[..., None], **arguments: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            # the server looks here for what it is to import, when it starts
            patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
            ensure_running()
        self._pipe, theirs = _CONTEXT.Pipe()
        # the server has the environment of when it was started, and a test may have defined connections since
        self._process = _CONTEXT.Process(target=_call, args=(theirs, dict(os.environ), work, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def say(self, what: object) -> None:
        self._pipe.send(what)

    def answer(self) -> Any:
        """What it says next.

        :raises EOFError: it has ended.
        """
        assert self._pipe.poll(PATIENCE), "it does not answer"
        return self._pipe.recv()

    def signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """End it as kill -9 does; it may have ended before."""
        self._process.kill()
        self.ended()

    def ended(self) -> int:
        """Wait until it has ended, and return its exit code."""
        self._process.join(PATIENCE)
        assert self._process.exitcode is not None, "it does not end"
        return self._process.exitcode

    def close(self) -> None:
        self.kill()
        self._process.close()
        self._pipe.close()


def _call(pipe: Connection, environment: Mapping[str, str], work: Callable[..., None], arguments: dict) -> None:
    os.environ.clear()
    os.environ.update(environment)
    work(pipe, **arguments)
