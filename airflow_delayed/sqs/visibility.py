"""How long received messages stay hidden from other consumers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from botocore.exceptions import ClientError

from airflow_delayed.sqs.entries import MAX_ENTRIES
from airflow_delayed.sqs.faults import REFUSED, fault_of
from airflow_delayed.sqs.settings import MAX_VISIBILITY, Duration, seconds_of

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient


def checked_seconds(span: Duration, *, received_at: datetime | None, now: datetime) -> int:
    """Return a visibility timeout in seconds from now.

    :param received_at: when the messages were received; the 12 hours that SQS allows in all count from then.
    :raises ValueError: it is negative, or more than what is left of 12 hours.
    """
    seconds = seconds_of("seconds", span)
    # a second is begun when it has begun
    passed = 0 if received_at is None else max(0, -(-(now - received_at) // timedelta(seconds=1)))
    most = MAX_VISIBILITY - passed
    if not 0 <= seconds <= most:
        spent = f", of which {passed:,} s have passed" if passed else ""
        raise ValueError(
            f"seconds={seconds:,} must be 0 to {max(0, most):,}: a message is hidden for at most 12 hours from its"
            f" receive{spent}. Delete it, and send it again with a delay, if that is too short"
        )
    return seconds


def change(client: SQSClient, url: str, handles: Sequence[str], seconds: int) -> dict[str, str]:
    """Set the timeout of messages, in batches, and return the handles that were refused, each with the reason.

    :raises botocore.exceptions.ClientError: SQS refused, and not for a message's sake.
    """
    refused: dict[str, str] = {}
    for start in range(0, len(handles), MAX_ENTRIES):
        batch = handles[start : start + MAX_ENTRIES]
        try:
            answer = client.change_message_visibility_batch(
                QueueUrl=url,
                Entries=[
                    {"Id": str(position), "ReceiptHandle": handle, "VisibilityTimeout": seconds}
                    for position, handle in enumerate(batch)
                ],
            )
        except ClientError as error:
            fault = fault_of(error)
            if fault is None or fault.code not in REFUSED:
                raise
            # the whole batch, for one message's sake
            if len(batch) == 1:
                refused[batch[0]] = str(fault)
            else:
                for handle in batch:
                    refused |= change(client, url, [handle], seconds)
            continue
        for entry in answer.get("Failed", ()):
            refused[batch[int(entry["Id"])]] = f"{entry['Code']}: {entry.get('Message', '')}"
    return refused
