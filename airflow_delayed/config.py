"""The section ``[delayed]`` of Airflow's configuration: defaults for all tasks.

A value that an operator was given wins over the option, and the option over its default. The descriptions and defaults
of all options are in :mod:`airflow_delayed.provider_info`. No other module reads the section.
"""

from __future__ import annotations

from datetime import timedelta
from tempfile import gettempdir

from airflow_delayed.errors import InvalidMessage, InvalidOption
from airflow_delayed.message import delay_of
from airflow_delayed.provider_info import get_provider_info

SECTION = "delayed"


def hold_over() -> timedelta:
    """Return how far ahead of its due time a message waits in a store, unless the sending operator has a value."""
    return _span("hold_over")


def lookahead() -> timedelta:
    """Return how far ahead ``lookahead="auto"`` dispatches where it does, see DispatchPolicy.auto_lookahead."""
    return _span("lookahead")


def remember() -> timedelta:
    """Return how long the ids of dispatched and cancelled messages are remembered, unless the operator has a value."""
    return _span("remember")


def cancel_grace() -> timedelta:
    """Return how long a cancel can be taken back; zero: not at all, and nothing of a cancelled message is kept."""
    return _span("cancel_grace")


def max_past() -> timedelta:
    """Return how long ago a message may have been due, unless the sending operator has a value."""
    return _span("max_past")


def max_messages_per_run() -> int:
    """Return how many messages one DelayedSendOperator may send in a run; 0: as many as it has."""
    return _number("max_messages_per_run", "give a whole number of messages; 0 is no limit")


def spool_folder() -> str:
    """Return the folder for the spools of queries and functions; by default that of temporary files."""
    return _text("spool_folder") or gettempdir()


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
    """Return the right that figures and lists of a connection need: to read "connections", or to see "plugins"."""
    text = _text("viewers")
    if text not in ("connections", "plugins"):
        raise InvalidOption("viewers", text, "write connections or plugins")
    return text


def page_body_limit() -> int:
    """Return how many bytes of a body the operations page shows to users with the right to see it; 0: none."""
    return _number("page_body_limit", "give a whole number of bytes, 0 or more")


def sqlite_on_shared_disk() -> bool:
    """Return whether all of Airflow's processes see the file of a store in SQLite, also where workers are remote."""
    return _switch("sqlite_on_shared_disk")


def _number(option: str, advice: str, least: int = 0) -> int:
    text = _text(option)
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise InvalidOption(option, text, advice)
    return int(text)


def _switch(option: str) -> bool:
    text = _text(option).lower()
    if text not in ("true", "false"):
        raise InvalidOption(option, text, "write True or False")
    return text == "true"


def _span(option: str) -> timedelta:
    text = _text(option)
    try:
        return delay_of(text, option)
    except (InvalidMessage, OverflowError):
        advice = "give a number of seconds, 0 or more, or an ISO 8601 duration such as PT10M"
        raise InvalidOption(option, text, advice) from None


def _names(option: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for part in _text(option).split(",") if (name := part.strip())))


def _text(option: str) -> str:
    from airflow_delayed.compat import conf

    default = get_provider_info()["config"][SECTION]["options"][option]["default"]
    return str(conf.get(SECTION, option, fallback=default)).strip()
