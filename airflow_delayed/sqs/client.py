"""The boto3 client of a connection: its options, the URLs of its queues, the meaning of its errors, its IAM actions.

NEEDS is the one source of the IAM actions, for the docs and for the error of a denied request. Batch requests have no
IAM actions of their own (Service Authorization Reference, "Actions for Amazon SQS"). A queue that is encrypted with a
KMS key needs actions on the key too ("Amazon SQS key management").
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from airflow_delayed.delivery import Connection, Finding, State, TopologyReport
from airflow_delayed.errors import AccessDenied, TopologyError, TransportUnavailable
from airflow_delayed.sqs import queues

if TYPE_CHECKING:
    from botocore.config import _RetryDict
    from mypy_boto3_sqs import SQSClient


#: Fields of a connection's extra that are arguments of a boto3 session.
_SESSION = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token", "region_name", "profile_name")
#: A queue does not exist: the code of the JSON protocol, and of the older protocol, which boto3 shows.
NO_QUEUE = frozenset({"QueueDoesNotExist", "AWS.SimpleQueueService.NonExistentQueue"})
#: The message itself is wrong. Every other refusal, such as a disabled key, concerns its queue.
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
#: SQS refuses a whole request because of one entry; sent one by one, only that entry fails.
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
#: Those of them after which botocore does not repeat the request.
_NOT_REPEATED = frozenset({"KmsThrottled", "OverLimit"})
#: Options of botocore's retries, each with the environment variable that sets it for all clients.
_RETRIES: Mapping[str, tuple[str, object]] = {
    "mode": ("AWS_RETRY_MODE", "standard"),
    "total_max_attempts": ("AWS_MAX_ATTEMPTS", 5),
}


def make_client(connection: Connection) -> SQSClient:
    """Return the client of a plain connection."""
    from boto3.session import Session

    extra = connection.extra
    session = {name: extra[name] for name in _SESSION if extra.get(name)}
    if connection.login and connection.password:
        session |= {"aws_access_key_id": connection.login, "aws_secret_access_key": connection.password}
    service = (extra.get("service_config") or {}).get("sqs") or {}
    config = Config(**{"parameter_validation": False, "retries": retries(), **(extra.get("config_kwargs") or {})})
    with translated(connection.conn_id, "make a client"):
        client: SQSClient = Session(**session).client(
            "sqs",
            endpoint_url=service.get("endpoint_url") or extra.get("endpoint_url"),
            verify=extra.get("verify"),
            config=config,
        )
    name_queues(client)
    return client


def retries() -> _RetryDict:
    """Return how botocore repeats a request that failed, where neither the connection nor the environment sets it."""
    options = {option: value for option, (variable, value) in _RETRIES.items() if variable not in os.environ}
    return cast("_RetryDict", options)


def not_repeated(client: SQSClient) -> None:
    """Have botocore repeat no request, which takes seconds: the caller does, and looks after others meanwhile."""
    client.meta.events.unregister("needs-retry.sqs", unique_id="retry-config-sqs")


@dataclass(frozen=True, slots=True)
class QueueUrls:
    """The names and URLs of queues, by destination; with ``fifo`` those of its delay queue. SQS is asked once."""

    conn_id: str
    client: SQSClient
    prefix: str
    _urls: dict[tuple[str, bool], str] = field(default_factory=dict)

    def name(self, destination: str, fifo: bool = False) -> str:
        """Return a queue's name in SQS."""
        return (queues.delay_queue_name if fifo else queues.queue_name)(destination, self.prefix)

    def url(self, destination: str, fifo: bool = False) -> str | None:
        """Return a queue's URL, or None if there is no such queue in the connection's account and region."""
        if (destination, fifo) not in self._urls:
            name, address = self.name(destination, fifo), queues.queue_address(destination)
            if address and address.region not in (None, self.client.meta.region_name):
                return None
            with translated(self.conn_id, f"look up queue {name}"):
                try:
                    url = self.client.get_queue_url(QueueName=name)["QueueUrl"]
                except ClientError as error:
                    if not is_missing(error):
                        raise
                    return None
            if address and url.split("/")[-2] != address.account:
                return None
            self._urls[destination, fifo] = url
        return self._urls[destination, fifo]

    def foreign(self, destination: str) -> Finding | None:
        """Return the finding for a URL or ARN at which :meth:`url` found no queue; None for a name.

        Such a queue is not created: it may be in another account.
        """
        address = queues.queue_address(destination)
        if address is None:
            return None
        return Finding(
            state=State.DIFFERS,
            resource=f"destination {destination}",
            destination=destination,
            wanted=f"a queue of the connection's own account in region {self.client.meta.region_name}",
            found=f"{address.name} of account {address.account} in region {address.region or 'unknown'}",
            remedy="send to a queue of another account or region through a connection of that one, which may take on a"
            f" role there (role_arn); to make a queue with this connection, name it {address.name!r}",
        )

    def existing(self, destination: str, fifo: bool = False) -> str:
        """Return a queue's URL."""
        url = self.url(destination, fifo)
        if url is None:
            raise self.missing(destination, fifo)
        return url

    def missing(self, destination: str, fifo: bool = False) -> TopologyError:
        """Return the error for a queue that does not exist."""
        foreign = None if fifo else self.foreign(destination)
        finding = foreign or Finding(
            state=State.MISSING,
            resource=queues.resource(self.name(destination, fifo)),
            # a delay queue that is missing does not make its destination a missing one
            destination=None if fifo else destination,
        )
        return TopologyError(self.conn_id, TopologyReport((finding,)))

    def forget(self, destination: str, fifo: bool = False) -> None:
        """Forget a URL at which there is no queue any more; the next call asks SQS again."""
        self._urls.pop((destination, fifo), None)


@dataclass(frozen=True, slots=True)
class EntryFault:
    """The reason why one entry was not confirmed. ``final``: to send it again at once cannot help."""

    code: str
    text: str
    final: bool

    def __str__(self) -> str:
        return f"{self.code}: {self.text}" if self.text else self.code


def fault_of(error: ClientError) -> EntryFault | None:
    """Return the fault that an error is for each entry of its request, or None if it does not concern entries."""
    problem = error.response.get("Error", {})
    code, text = problem.get("Code", ""), problem.get("Message", "")
    if code in NO_QUEUE or code in REFUSED:
        return EntryFault(code, text, final=True)
    if is_busy(error):
        return EntryFault(code, text, final=code not in _NOT_REPEATED)
    return None


def is_busy(error: ClientError) -> bool:
    """Return whether SQS had too much to do, or failed; botocore has repeated most of such requests already."""
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return error.response.get("Error", {}).get("Code") in BUSY or status >= 500


def is_missing(error: ClientError) -> bool:
    """Return whether an error says that a queue does not exist."""
    return error.response.get("Error", {}).get("Code") in NO_QUEUE


@contextmanager
def translated(conn_id: str, doing: str) -> Iterator[None]:
    """Turn the errors of boto3 into TransportUnavailable, with advice on what to look at.

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


DESTINATION, DELAY_QUEUE, DEAD_LETTER_QUEUE = "destination", "delay queue", "dead-letter queue"
ERROR_QUEUE = "error queue"

#: What a sender and a receiver need of the KMS key of an encrypted queue.
KMS_SEND = ("kms:GenerateDataKey", "kms:Decrypt")
KMS_RECEIVE = ("kms:Decrypt",)


@dataclass(frozen=True, slots=True)
class Need:
    """IAM actions that one method of SqsDelayHook needs on one kind of queue."""

    method: str
    queue: str
    actions: Sequence[str]
    #: When; empty: always.
    when: str = ""


def _sqs(*names: str) -> tuple[str, ...]:
    return tuple(f"sqs:{name}" for name in names)


_LOOK = _sqs("GetQueueUrl", "GetQueueAttributes")

#: Every IAM action that is needed, by method and queue.
NEEDS: Sequence[Need] = (
    Need("verify", DESTINATION, _LOOK),
    Need("verify", DELAY_QUEUE, _LOOK, "unrestricted_delay is on"),
    Need("verify", DEAD_LETTER_QUEUE, _LOOK, "settings name one; otherwise only to count dead letters"),
    Need("install", DESTINATION, _LOOK),
    Need("install", DESTINATION, _sqs("CreateQueue"), "create_destinations=True"),
    Need("install", DESTINATION, _sqs("SetQueueAttributes"), "repair=True"),
    Need("install", DELAY_QUEUE, (*_LOOK, *_sqs("CreateQueue")), "unrestricted_delay is on"),
    Need("install", DELAY_QUEUE, _sqs("SetQueueAttributes"), "unrestricted_delay is on and repair=True"),
    Need("install", DEAD_LETTER_QUEUE, _LOOK, "settings name one"),
    Need("install", DEAD_LETTER_QUEUE, _sqs("CreateQueue"), "settings name one and create_destinations=True"),
    Need("install", DEAD_LETTER_QUEUE, _sqs("SetQueueAttributes"), "settings name one and repair=True"),
    Need("send", DESTINATION, _sqs("GetQueueUrl", "SendMessage")),
    Need("send", DESTINATION, _sqs("GetQueueAttributes"), "a message is due in over 900 s"),
    Need("send", DELAY_QUEUE, (*_LOOK, *_sqs("SendMessage")), "a message is due in over 900 s"),
    Need("cycle", DESTINATION, _sqs("GetQueueUrl", "SendMessage")),
    Need(
        "cycle",
        DELAY_QUEUE,
        _sqs(
            "GetQueueUrl",
            "GetQueueAttributes",
            "ReceiveMessage",
            "SendMessage",
            "DeleteMessage",
            "ChangeMessageVisibility",
        ),
    ),
    Need(
        "cycle",
        ERROR_QUEUE,
        _sqs("GetQueueUrl", "CreateQueue", "SendMessage"),
        "a message cannot be read, or is refused for good",
    ),
    Need("life", DESTINATION, _LOOK),
    Need("life", DELAY_QUEUE, _LOOK),
    Need("life", DEAD_LETTER_QUEUE, _LOOK, "the destination has one"),
    Need("extend_visibility", DESTINATION, _sqs("GetQueueUrl", "ChangeMessageVisibility")),
    Need("redrive", DESTINATION, (*_LOOK, *_sqs("SendMessage"))),
    Need(
        "redrive",
        DEAD_LETTER_QUEUE,
        (*_LOOK, *_sqs("ListDeadLetterSourceQueues", "StartMessageMoveTask", "ReceiveMessage", "DeleteMessage")),
    ),
    Need("redrive", DEAD_LETTER_QUEUE, _sqs("ChangeMessageVisibility"), "SQS does not move them itself"),
    Need("test_connection", "*", _sqs("ListQueues")),
)

#: Where the name differs from that of the request.
_ACTIONS: Mapping[str, str] = {
    "SendMessageBatch": "SendMessage",
    "DeleteMessageBatch": "DeleteMessage",
    "ChangeMessageVisibilityBatch": "ChangeMessageVisibility",
}
#: Where an error keeps the queue of its request.
_QUEUE = "airflow_delayed.queue"
#: The queue in the text of an answer.
_ARN = re.compile(r"\barn:aws[\w-]*:sqs:[\w-]*:\d*:([\w.-]*[\w-])")


def is_denied(error: ClientError) -> bool:
    """Return whether an error says that a role may not do something; of SQS or of KMS."""
    return "AccessDenied" in error.response.get("Error", {}).get("Code", "")


def denied_actions(error: ClientError) -> tuple[str, ...]:
    """Return the IAM actions that an answer says are not allowed."""
    request = _ACTIONS.get(error.operation_name, error.operation_name)
    if "kms" in error.response.get("Error", {}).get("Code", "").lower():
        return KMS_SEND if request == "SendMessage" else KMS_RECEIVE
    return (f"sqs:{request}",)


def name_queues(client: SQSClient) -> None:
    """Let the errors of a client say which queue they are about: SQS's own answer need not, and a batch has many."""

    def note(params: Mapping[str, Any], context: dict[str, Any], **_: object) -> None:
        context[_QUEUE] = params.get("QueueUrl") or params.get("QueueName")

    def name_queue(parsed: dict[str, Any], context: Mapping[str, Any], **_: object) -> None:
        if "Error" in parsed and context.get(_QUEUE):
            parsed["Error"][_QUEUE] = context[_QUEUE]

    # with an id, so that a second call for the same client registers nothing more
    client.meta.events.register("before-parameter-build.sqs", note, unique_id="airflow-delayed-note-queue")
    client.meta.events.register("after-call.sqs", name_queue, unique_id="airflow-delayed-tell-queue")


def denied_queue(error: ClientError) -> str | None:
    """Return the name of the queue that an answer is about, if that is known."""
    problem = error.response.get("Error", {})
    if named := problem.get(_QUEUE):
        return str(named).rsplit("/", 1)[-1]
    found = _ARN.search(problem.get("Message", ""))
    return found[1] if found else None
