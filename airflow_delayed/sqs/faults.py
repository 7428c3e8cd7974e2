"""What SQS and the way to it answer when something is wrong, and what it means for us."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from botocore.exceptions import BotoCoreError, ClientError

from airflow_delayed.errors import AccessDenied, TransportUnavailable
from airflow_delayed.sqs.access import denied_actions, denied_queue, is_denied

#: A queue is not there: the code of the JSON protocol, and that of the older one which boto3 shows.
NO_QUEUE = frozenset({"QueueDoesNotExist", "AWS.SimpleQueueService.NonExistentQueue"})
#: Something is wrong with a message itself. All else that does not pass, such as a disabled key, concerns its queue.
UNACCEPTABLE = frozenset(
    {
        "BatchRequestTooLong",
        "AWS.SimpleQueueService.BatchRequestTooLong",
        "InvalidAttributeName",
        "InvalidAttributeValue",
        "InvalidMessageContents",
        "InvalidParameterValue",
    }
)
#: SQS refuses a whole request for one entry's sake; sent one by one, only that entry fails.
REFUSED = UNACCEPTABLE | {
    "MissingParameter",
    "UnsupportedOperation",
    "AWS.SimpleQueueService.UnsupportedOperation",
}
#: SQS has too much to do, or is at odds with itself; it helps to wait.
BUSY = frozenset(
    {
        "InternalError",
        "InternalFailure",
        "KmsThrottled",
        "OverLimit",
        "RequestThrottled",
        "ServiceUnavailable",
        "Throttling",
        "ThrottlingException",
    }
)


@dataclass(frozen=True, slots=True)
class Fault:
    """Why one entry was not confirmed. ``final``: sending it again cannot help."""

    code: str
    text: str
    final: bool

    def __str__(self) -> str:
        return f"{self.code}: {self.text}" if self.text else self.code


def fault_of(error: ClientError) -> Fault | None:
    """Return what an error means for each entry of its request, or None if it is not about entries at all."""
    problem = error.response.get("Error", {})
    code, text = problem.get("Code", ""), problem.get("Message", "")
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if code in NO_QUEUE or code in REFUSED:
        return Fault(code, text, final=True)
    if code in BUSY or status >= 500:
        return Fault(code, text, final=False)
    return None


def is_missing(error: ClientError) -> bool:
    """Return whether an error says that a queue does not exist."""
    return error.response.get("Error", {}).get("Code") in NO_QUEUE


@contextmanager
def translated(conn_id: str, doing: str) -> Iterator[None]:
    """Turn what boto3 raises into TransportUnavailable, which says what to look at.

    :raises AccessDenied: the role may not do it; the error names the IAM actions and the queue.
    """
    try:
        yield
    except ClientError as error:
        problem = error.response.get("Error", {})
        answer = f"{problem.get('Code')}: {problem.get('Message')}"
        if is_denied(error):
            raise AccessDenied(conn_id, denied_actions(error), denied_queue(error), doing, answer) from error
        raise TransportUnavailable(
            f"connection {conn_id!r} could not {doing}: SQS answered {answer.rstrip('.')}."
            " Look at the connection's region and credentials and at what its role may do"
        ) from error
    except BotoCoreError as error:
        answer = str(error).rstrip(".")
        raise TransportUnavailable(
            f"connection {conn_id!r} could not {doing}: {answer}. Look at the connection's endpoint_url, region and"
            " credentials, and at the network"
        ) from error
