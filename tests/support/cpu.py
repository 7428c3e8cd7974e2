"""CPU that tests cost: of the process that plays them and of all that it starts; for the list at the end of a run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

#: CPU-seconds by test, with what was set up and taken down for it. What a file or a run shares counts for the test that
#: came first, or last.
SECONDS: dict[str, float] = {}
#: So many are listed.
LISTED = 10
_TICKS = os.sysconf("SC_CLK_TCK")


def used() -> float:
    """Return the CPU-seconds of this process, of its children that ended, and of all below it that run."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + _below(os.getpid())


def _below(process: int) -> float:
    seconds = 0.0
    for child in _children(process):
        try:
            stat = Path(f"/proc/{child}/stat").read_text()
        except OSError:  # it has ended
            continue
        # user, system, and both of children that ended; the name before them may hold blanks
        seconds += sum(map(int, stat.rpartition(")")[2].split()[11:15])) / _TICKS + _below(child)
    return seconds


def _children(process: int) -> list[int]:
    try:
        threads = list(Path(f"/proc/{process}/task").iterdir())
        return [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:
        return []


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before, began = used(), time.monotonic()
    answer = yield
    # a process that ended, or whose child did, may take figures with it or bring those from before
    most = (time.monotonic() - began) * (os.cpu_count() or 1)
    SECONDS[item.nodeid] = min(max(0.0, used() - before), most)
    return answer


def lines() -> list[str]:
    """Return the most costly tests, for the end of a run."""
    most = sorted(SECONDS.items(), key=lambda each: -each[1])[:LISTED]
    return [f"{seconds:7.1f} s  {test}" for test, seconds in most]
