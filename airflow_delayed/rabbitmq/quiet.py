"""Keeping pika's own log lines out of a task's log.

It logs some ten lines for each connection, a warning for each refusal, which is how the broker answers our questions,
and a stack trace for each host that does not answer; what went wrong is told by our errors.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_quiet: ContextVar[bool] = ContextVar("airflow_delayed_rabbitmq_quiet", default=False)


@contextmanager
def quiet() -> Iterator[None]:
    """Have pika log nothing meanwhile in this thread; all as ever if somebody set a level for the logger ``pika``.

    In Airflow that is the option ``namespace_levels`` of the section ``logging``: ``pika=INFO``.
    """
    for name in list(logging.root.manager.loggerDict):
        # a filter is not inherited, and one that is there already is not added
        if name.startswith("pika."):
            logging.getLogger(name).addFilter(_wanted)
    token = _quiet.set(True)
    try:
        yield
    finally:
        _quiet.reset(token)


def _wanted(_: logging.LogRecord) -> bool:
    return not _quiet.get() or logging.getLogger("pika").level != logging.NOTSET
