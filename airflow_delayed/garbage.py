"""How often Python looks for garbage while many messages are made and let go."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

#: More objects than are alive of the messages that wait for a transport.
_ALIVE = 25_000
_lock = Lock()
_senders = 0
_before = (0, 0, 0)


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Let the messages of a chunk live and die before garbage is looked for the next time.

    Else Python takes each few thousand of them for objects that will stay, and looks through all that the process has,
    which in one with Airflow in it costs more than reading the rows. The threshold is the process's: the first of
    several senders raises it, and the last restores it.
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
