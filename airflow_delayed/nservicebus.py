"""What NServiceBus endpoints read in the headers of a message: a due time, and the form of a time.

Source: NServiceBus 10, Headers.cs and DateTimeOffsetHelper.cs.
"""

from __future__ import annotations

from datetime import datetime

from airflow_delayed.message import UTC

#: When a delayed message is due, not rounded to the transport's unit. An endpoint's ``critical_time`` counts from here
#: (IncomingPipelineMetrics.cs), without it from the time the message was sent.
DELIVER_AT = "NServiceBus.DeliverAt"


def nservicebus_time(moment: datetime) -> str:
    """Write a time as NServiceBus does: ``2025-11-28 00:05:18:653833 Z``.

    :param moment: in UTC.
    """
    text = moment.isoformat(" ", "microseconds")
    return f"{text[:19]}:{text[20:26]} Z"


def parse_nservicebus_time(text: object) -> datetime | None:
    """Read what :func:`nservicebus_time` writes; None if it is something else."""
    if not isinstance(text, str):
        return None
    try:
        return datetime.strptime(text, "%Y-%m-%d %H:%M:%S:%f Z").replace(tzinfo=UTC)
    except ValueError:
        return None
