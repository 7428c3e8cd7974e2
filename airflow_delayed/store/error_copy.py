"""What goes to the error destination: the message as it was, and why it could not be delivered.

The headers are NServiceBus's: FaultsHeaderKeys.FailedQ (``NServiceBus.FailedQ``), ``NServiceBus.ExceptionInfo.Message``
and ``NServiceBus.TimeOfFailure`` (DateTimeOffsetHelper: ``yyyy-MM-dd HH:mm:ss:ffffff Z``). FailedQ names the queue that
it was for, so that ServicePulse's retry sends it there.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from airflow_delayed.message import UTC, DelayedMessage

FAILED_QUEUE = "NServiceBus.FailedQ"
REASON = "NServiceBus.ExceptionInfo.Message"
TIME_OF_FAILURE = "NServiceBus.TimeOfFailure"


def error_copy(message: DelayedMessage, destination: str, reason: str, now: datetime) -> DelayedMessage:
    """Return the message for the error destination, which gets it at once, and with no time to expire."""
    headers = {
        **message.headers,
        FAILED_QUEUE: message.destination,
        REASON: reason,
        TIME_OF_FAILURE: f"{now.astimezone(UTC):%Y-%m-%d %H:%M:%S:%f} Z",
    }
    return replace(message, destination=destination, headers=headers, due_at=min(message.due_at, now), expires_at=None)
