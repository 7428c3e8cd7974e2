"""The queue for messages that cannot be delivered: they do not say when they are due, or a queue refuses them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from botocore.exceptions import ClientError

from airflow_delayed.errors import DelayedError
from airflow_delayed.sqs.access import denied_actions, denied_queue, is_denied
from airflow_delayed.sqs.entries import DELAY_SECONDS, DUE_AT, direct
from airflow_delayed.sqs.parked import fill, own_id
from airflow_delayed.sqs.post import Addressed, Outcome, Poster
from airflow_delayed.sqs.queues import DELAY_RETENTION

if TYPE_CHECKING:
    from mypy_boto3_sqs.literals import QueueAttributeNameType
    from mypy_boto3_sqs.type_defs import MessageTypeDef

    from airflow_delayed.sqs.entries import Attributes

log = logging.getLogger(__name__)

#: Of the queue for messages that cannot be delivered, which keeps them for as long as SQS can.
ERROR_SUFFIX = "-error"
ERROR_QUEUE: Mapping[QueueAttributeNameType, str] = {"MessageRetentionPeriod": str(DELAY_RETENTION)}
#: Why a message is in the error queue, and the name of the queue that it comes from.
REASON = "AirflowDelayed.Reason"
FROM_QUEUE = "AirflowDelayed.FromQueue"
UNREADABLE = f"neither {DELAY_SECONDS} nor {DUE_AT} can be read"


def set_aside(
    poster: Poster,
    error_url: Callable[[], str],
    fifo_url: str,
    messages: Sequence[MessageTypeDef],
    reasons: Mapping[str, str],
) -> tuple[list[MessageTypeDef], list[Outcome[MessageTypeDef]]]:
    """Send messages to the error queue as they are; return those that were sent, and those that were not.

    :param reasons: why, by SQS id.
    """
    try:
        url = error_url()
    except DelayedError as error:
        log.error("%s messages cannot be delivered, and there is no error queue: %s", f"{len(messages):,}", error)
        return [], [Outcome(message, fifo_url, None) for message in messages]

    def address(message: MessageTypeDef) -> Addressed:
        attributes = cast("Attributes", dict(message.get("MessageAttributes", {})))
        why = {REASON: reasons[message["MessageId"]], FROM_QUEUE: fifo_url.rpartition("/")[2], **own_id(message)}
        size = fill(message["Body"], attributes, why)
        return Addressed(url, direct(message["Body"], attributes, 0), size)

    sent: list[MessageTypeDef] = []
    failed: list[Outcome[MessageTypeDef]] = []
    try:
        outcomes = list(poster.each(messages, address))
    except ClientError as error:
        if not is_denied(error):
            raise
        log.error(
            "%s messages cannot be delivered, and the role may not do %s on queue %s to set them aside",
            f"{len(messages):,}",
            ", ".join(denied_actions(error)),
            denied_queue(error),
        )
        return [], [Outcome(message, fifo_url, None) for message in messages]
    for outcome in outcomes:
        if outcome.fault:
            failed.append(outcome)
            continue
        sent.append(outcome.item)
        log.error(
            "SQS message %s in %s: %s; it is in %s now, whole. Send it back when that is mended, or delete it",
            outcome.item["MessageId"],
            fifo_url,
            reasons[outcome.item["MessageId"]],
            url,
        )
    return sent, failed
