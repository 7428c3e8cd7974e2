"""A temporary queue of SQS. What is delayed waits in it, and goes with it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from airflow_delayed.errors import DelayedError
from airflow_delayed.sqs.client import QueueUrls, translated
from airflow_delayed.temporary_queue import TemporaryQueue

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient

#: Seconds: the longest that SQS waits for a message.
_LONGEST_WAIT = 20


class SqsTemporaryQueue(TemporaryQueue):
    """A standard queue of its own; it is removed whatever is on its way to it."""

    def __init__(self, name: str, conn_id: str, client: SQSClient, url: str) -> None:
        super().__init__(name)
        self._conn_id = conn_id
        self._client = client
        self._url = url

    def arrives(self, seconds: float) -> bool:
        """Wait for a message, whole seconds and at least one."""
        deadline = time.monotonic() + seconds
        while True:
            left = min(max(round(deadline - time.monotonic()), 1), _LONGEST_WAIT)
            with translated(self._conn_id, f"receive from queue {self.name}"):
                answer = self._client.receive_message(QueueUrl=self._url, WaitTimeSeconds=left)
            if answer.get("Messages"):
                return True
            if time.monotonic() >= deadline:
                return False

    def end(self) -> None:
        """Delete the queue."""
        try:
            with translated(self._conn_id, f"delete queue {self.name}"):
                self._client.delete_queue(QueueUrl=self._url)
        except DelayedError as error:
            self.remains = f"queue {self.name} stays, and has to be deleted by hand: {error}"


@contextmanager
def temporary_queue(urls: QueueUrls, name: str) -> Iterator[TemporaryQueue]:
    """Make a queue for the block."""
    conn_id, client, queue_name = urls.conn_id, urls.client, urls.name(name)
    with translated(conn_id, f"create queue {queue_name}"):
        url = client.create_queue(QueueName=queue_name)["QueueUrl"]
    queue = SqsTemporaryQueue(name, conn_id, client, url)
    try:
        yield queue
    finally:
        queue.end()
        urls.forget(name)
