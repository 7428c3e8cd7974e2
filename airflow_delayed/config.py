"""The section ``[delayed]`` of Airflow's configuration: what holds for all tasks unless one says otherwise.

Each option is described in :mod:`airflow_delayed.provider_info`, which also has its default. Nothing else reads it.
"""

from __future__ import annotations

from datetime import timedelta

from airflow_delayed.errors import InvalidMessage, InvalidOption
from airflow_delayed.message import delay_of
from airflow_delayed.provider_info import get_provider_info

SECTION = "delayed"


def hold_over() -> timedelta:
    """Return how far ahead of its due time a message waits in a store, where the operator that sends does not say."""
    return _span("hold_over")


def lookahead() -> timedelta:
    """Return how long before its due time a dispatcher hands a message over, where its operator does not say."""
    return _span("lookahead")


def remember() -> timedelta:
    """Return how long the ids of what was handed over or cancelled are remembered, where the operator does not say."""
    return _span("remember")


def max_past() -> timedelta:
    """Return how long ago a message may have been due, where the operator that sends does not say."""
    return _span("max_past")


def deliver_conn_ids() -> tuple[str, ...]:
    """Return the connections that a StoreDispatchOperator delivers through if it names none; perhaps none here too."""
    return _names("deliver_conn_ids")


def page_stores() -> tuple[str, ...]:
    """Return the SQL connections whose stores the operations page shows."""
    return _names("page_stores")


def page_rabbitmq() -> tuple[str, ...]:
    """Return the RabbitMQ connections that the operations page shows."""
    return _names("page_rabbitmq")


def page_sqs() -> tuple[tuple[str, str], ...]:
    """Return the connection and the destination of each SQS queue that the operations page shows."""
    pairs = []
    for name in _names("page_sqs"):
        # a queue's name has no colon; a connection's may
        conn_id, colon, queue = (part.strip() for part in name.rpartition(":"))
        if not (colon and conn_id and queue):
            raise InvalidOption("page_sqs", name, "write each as conn_id:queue, such as aws_default:reminders")
        pairs.append((conn_id, queue))
    return tuple(pairs)


def viewers() -> str:
    """Return who sees figures and lists of a connection: who may read "connections", or all who see "plugins"."""
    text = _text("viewers")
    if text not in ("connections", "plugins"):
        raise InvalidOption("viewers", text, "write connections or plugins")
    return text


def page_body_limit() -> int:
    """Return how many bytes of a body the operations page shows to those who may see it; 0: none."""
    text = _text("page_body_limit")
    if not (text.isascii() and text.isdigit()):
        raise InvalidOption("page_body_limit", text, "give a whole number of bytes, 0 or more")
    return int(text)


def _span(option: str) -> timedelta:
    text = _text(option)
    try:
        return delay_of(text, option)
    except (InvalidMessage, OverflowError):
        raise InvalidOption(option, text, "give a number of seconds, 0 or more") from None


def _names(option: str) -> tuple[str, ...]:
    """Return each name of a list once, in order."""
    return tuple(dict.fromkeys(name for part in _text(option).split(",") if (name := part.strip())))


def _text(option: str) -> str:
    from airflow_delayed.compat import conf

    default = get_provider_info()["config"][SECTION]["options"][option]["default"]
    return str(conf.get(SECTION, option, fallback=default)).strip()
