"""Python's garbage collector, while many messages pass through the process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

#: A threshold above the number of objects that the messages of a chunk, or of a dispatcher's claims, keep alive.
_ALIVE = 25_000
_lock = Lock()
_senders = 0
_before = (0, 0, 0)


@contextmanager
def relaxed_gc() -> Iterator[None]:
    """Raise the threshold of Python's garbage collector, so that it does not run while a chunk's messages are alive.

    Otherwise, every few thousand messages, the collector scans all objects of the process. With Airflow loaded that
    costs more than reading the rows, and some 3 % of a dispatcher's own CPU. The threshold is the process's: the first
    of several senders and dispatchers raises it, and the last restores it.
    """
    global _senders, _before
    with _lock:
        _senders += 1
        if _senders == 1:
            first, second, third = _before = gc.get_threshold()
            if 0 < first < _ALIVE:
                gc.set_threshold(_ALIVE, second, third)
    try:
        yield
    finally:
        with _lock:
            _senders -= 1
            if _senders == 0:
                gc.set_threshold(*_before)
