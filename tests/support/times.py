"""Operators and sensors by another clock than the machine's."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import TypeVar

Task = TypeVar("Task")


def by_clock(task: Task, clock: Callable[[], datetime]) -> Task:
    """Return a task whose present is that of a clock."""
    task.clock = clock  # type: ignore[attr-defined]
    return task
