"""The memory that a call takes."""

from __future__ import annotations

import multiprocessing
import tracemalloc
from collections.abc import Callable
from multiprocessing.connection import Connection

_FORK = multiprocessing.get_context("fork")


def peak(call: Callable[[], object]) -> int:
    """Call in a fork, and return the most bytes that Python held there for it.

    A fork has none of the threads of this process, whose allocations would be counted too.
    """
    here, there = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_measure, args=(there, call))
    process.start()
    there.close()
    try:
        return here.recv()
    finally:
        process.join()


def _measure(there: Connection, call: Callable[[], object]) -> None:
    tracemalloc.start()
    call()
    there.send(tracemalloc.get_traced_memory()[1])
