"""Operators and sensors by another clock than the machine's."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar

Task = TypeVar("Task")


def by_clock(task: Task, clock: Callable[[], datetime], **more: Any) -> Task:
    """Return a task whose present is that of a clock.

    :param more: further attributes, such as ``sleep``.
    """
    for name, value in {"clock": clock, **more}.items():
        setattr(task, name, value)
    return task
