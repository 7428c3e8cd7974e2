"""How many tasks of one executor may have a connection open at a time."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

#: Seconds between two looks for a free slot.
PAUSE = 0.05


@contextmanager
def slot(
    most: int | None,
    *,
    folder: Path | None = None,
    group: int | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[None]:
    """Hold one of the executor's slots within the block; wait until one is free.

    The kernel frees what a killed worker held.

    :param most: slots of an executor; None: no limit.
    :param group: what the workers of an executor have in common, by default the process that started them.
    """
    if most is None:
        yield
        return
    # of the same user only: another one could not open the file
    name = f"airflow-delayed-{os.getuid()}-{group or os.getppid()}"
    files = [Path(folder or tempfile.gettempdir(), f"{name}-{number}.slot") for number in range(most)]
    while True:
        for file in files:
            handle = os.open(file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
                continue
            try:
                yield
            finally:
                os.close(handle)
            return
        sleep(PAUSE)
