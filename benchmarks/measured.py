"""What one contestant took, measured in its own process: time, its CPU, and that of the PostgreSQL beside it.

Only the standard library: the peers import it from a virtual environment of their own.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Measured:
    """Seconds for so many messages; CPU is user and system time.

    :param peak: the most memory that one of its processes had, in MiB, where that was looked at.
    """

    count: int
    seconds: float
    client: float
    server: float
    peak: float = 0

    @property
    def rate(self) -> float:
        return self.count / self.seconds

    @property
    def client_us(self) -> float:
        """Of a message."""
        return self.client / self.count * 1e6

    @property
    def server_us(self) -> float:
        """Of a message."""
        return self.server / self.count * 1e6

    def tell(self) -> None:
        """Print it for the process that asked."""
        print(json.dumps(asdict(self)))


class Stopwatch:
    """Takes the time from here on.

    :param server: the process id of the PostgreSQL.
    """

    def __init__(self, server: int) -> None:
        gc.collect()
        self._server = server
        self._server_before = server_cpu(server)
        self._client_before = time.process_time()
        self._start = time.perf_counter()

    def stop(self, count: int) -> Measured:
        seconds, client = time.perf_counter() - self._start, time.process_time() - self._client_before
        return Measured(count, seconds, client, server_cpu(self._server) - self._server_before)


def measure(server: int, work: Callable[[], int]) -> None:
    """Tell what it took; ``work`` returns how many messages that were."""
    watch = Stopwatch(server)
    watch.stop(work()).tell()


async def measure_async(server: int, work: Callable[[], Awaitable[int]]) -> None:
    """Tell what it took; ``work`` returns how many messages that were."""
    watch = Stopwatch(server)
    watch.stop(await work()).tell()


def server_cpu(pid: int) -> float:
    """Seconds of CPU that a PostgreSQL has used: its first process, those that have ended, and those that run."""
    total = sum(_ticks(pid)[:4])
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        try:
            total += sum(_ticks(int(child))[:2])
        except OSError:
            continue  # it has just ended
    return total / _TICK


def _ticks(pid: int) -> list[int]:
    """User, system, and both of the children that have ended."""
    fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    return [int(field) for field in fields[11:15]]
