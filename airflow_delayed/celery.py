"""What Celery's workers read in a message: the task in its headers, the arguments in its body.

Source: Celery 5.7, app/amqp.py (as_task_v2) and worker/request.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from airflow_delayed.message import DelayedMessage

#: Header with the name of the task.
TASK = "task"
#: Header with the id of the task. RabbitMQ's transport writes the message's id there, if the headers have none.
TASK_ID = "id"
#: Headers that every task has: how its body is read, and the language of its sender, by which workers know protocol 2.
_HEADERS = {"content-type": "application/json", "lang": "py"}


def task(name: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the value and the headers of a message that a Celery worker runs, as a row or as parameters of a send.

    ``messages=[{**task("shop.remind", [17]), "due_at": due}]``, or ``DelayedSendOperator(..., **task("shop.remind"))``.
    The task's id is the message's. Two calls with the same arguments are equal, and so are the ids that are made of
    such rows. Results, callbacks and time limits are the worker's own settings.

    :param name: of the task, as the worker has registered it: ``shop.tasks.remind``.
    :param args: its arguments, which JSON can write.
    :param kwargs: its arguments by name.
    :raises ValueError: the name is empty, or the arguments are none.
    """
    if not name.strip():
        raise ValueError("name is empty; give the name of the task as the worker has registered it")
    if isinstance(args, str | bytes | Mapping):
        raise ValueError(f"args must be a list of the task's arguments, not {type(args).__name__}")
    if not isinstance(kwargs, Mapping | None):
        raise ValueError(f"kwargs must be a dictionary of the task's arguments, not {type(kwargs).__name__}")
    return {"value": [list(args), dict(kwargs or {}), {}], "headers": {**_HEADERS, TASK: name}}


def is_task(headers: Mapping[str, str]) -> bool:
    """Return whether headers are those of a task, as :func:`task` and Celery itself make them."""
    return TASK in headers and headers.get("lang") == _HEADERS["lang"]


def warning_without_task(message: DelayedMessage) -> str | None:
    """Return a warning for the log if a Celery worker could not run a message."""
    if TASK in message.headers:
        return None
    return (
        f"message {message.message_id} to {message.destination} has no header {TASK}: a Celery worker would delete it"
        " as an unknown message; make value and headers by airflow_delayed.celery.task('the task', [arguments]), and"
        " look for others like it"
    )
