"""The queues of a connection by name: what they are called in SQS, and their URLs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from botocore.exceptions import ClientError

from airflow_delayed.delivery import Finding, State, TopologyReport
from airflow_delayed.errors import TopologyError
from airflow_delayed.sqs import queues
from airflow_delayed.sqs.faults import is_missing, translated

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient


@dataclass(frozen=True, slots=True)
class Directory:
    """Finds a queue by its destination, and by whether its delay queue is meant. URLs are asked for once."""

    conn_id: str
    client: SQSClient
    prefix: str
    _urls: dict[tuple[str, bool], str] = field(default_factory=dict)

    def name(self, destination: str, fifo: bool = False) -> str:
        """Return a queue's name in SQS.

        :raises LimitExceeded: it has more than 80 characters.
        """
        return (queues.delay_queue_name if fifo else queues.queue_name)(destination, self.prefix)

    def url(self, destination: str, fifo: bool = False) -> str | None:
        """Return a queue's URL, or None if there is no such queue."""
        if (destination, fifo) not in self._urls:
            name = self.name(destination, fifo)
            with translated(self.conn_id, f"look up queue {name}"):
                try:
                    self._urls[destination, fifo] = self.client.get_queue_url(QueueName=name)["QueueUrl"]
                except ClientError as error:
                    if not is_missing(error):
                        raise
                    return None
        return self._urls[destination, fifo]

    def wanted(self, destination: str, fifo: bool = False) -> str:
        """Return a queue's URL.

        :raises TopologyError: there is no such queue.
        """
        url = self.url(destination, fifo)
        if url is None:
            raise self.missing(destination, fifo)
        return url

    def missing(self, destination: str, fifo: bool = False) -> TopologyError:
        """Return the error that says so."""
        finding = Finding(
            state=State.MISSING,
            resource=queues.resource(self.name(destination, fifo)),
            # a delay queue that is missing does not make its destination a missing one
            destination=None if fifo else destination,
        )
        return TopologyError(self.conn_id, TopologyReport((finding,)))

    def forget(self, destination: str, fifo: bool = False) -> None:
        """Ask for a URL anew: the one that is known turned out to lead nowhere."""
        self._urls.pop((destination, fifo), None)
