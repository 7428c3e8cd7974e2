"""Sending some messages, and noting in the store in front which of them were confirmed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from airflow_delayed.delivery import Delivery, SendReport
from airflow_delayed.errors import DelayedError, SendFailed
from airflow_delayed.message import DelayedMessage


def send_and_note(
    delivery: Delivery,
    messages: list[DelayedMessage],
    report: SendReport,
    note: Callable[[list[DelayedMessage]], None] | None = None,
) -> None:
    """Send messages, and note those that were confirmed.

    Whoever is killed in between sends them again, with the same ids.
    """
    try:
        report.merge(delivery.send(messages))
    except DelayedError as error:
        partly = getattr(error, "report", None)
        if isinstance(partly, SendReport):
            report.merge(partly)
        if note is not None and isinstance(error, SendFailed):
            # what goes wrong first is what is told
            with suppress(DelayedError):
                note(_confirmed(messages, error))
        raise
    if note is not None:
        note(messages)


def _confirmed(messages: list[DelayedMessage], error: SendFailed) -> list[DelayedMessage]:
    """Return the messages that were confirmed, or none if their transport does not tell which.

    One that was not even tried must not pass for sent, so it has to tell of each.
    """
    failed = {message_id for message_id, _ in error.failures}
    others = [message for message in messages if message.message_id not in failed]
    told = error.report.sent + error.report.duplicates
    return others if told == len(others) and told + len(error.failures) == len(messages) else []
