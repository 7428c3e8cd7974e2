"""What can be done with messages that are in the queues of one destination: looked at, kept hidden, moved back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from botocore.exceptions import ClientError

from airflow_delayed.delivery import Finding, State, TopologyReport
from airflow_delayed.errors import TopologyError
from airflow_delayed.sqs import queues
from airflow_delayed.sqs.compare import redrive_policy
from airflow_delayed.sqs.faults import is_missing, translated
from airflow_delayed.sqs.life import Life, stage
from airflow_delayed.sqs.post import Poster
from airflow_delayed.sqs.redrive import Mover, Redriven, start_task
from airflow_delayed.sqs.topology import Found, Queues

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient


@dataclass(frozen=True, slots=True)
class Keeper:
    """The messages of a connection's destinations; see SqsDelayHook, whose methods these are."""

    conn_id: str
    client: SQSClient
    queues: Queues
    poster: Callable[[], Poster]

    def life(self, destination: str) -> Life:
        """Return the counts of all queues of a destination."""
        there = self._there(destination)
        fifo = self.queues.look(destination, True)
        policy = redrive_policy(there.attributes)
        dead = self._dead_letter(policy[0]) if policy else None
        return Life(
            destination=stage(there.name, there.attributes),
            delay_queue=stage(fifo.name, fifo.attributes) if fifo else None,
            dead_letter_queue=stage(dead.name, dead.attributes) if dead else None,
            max_receive_count=policy[1] if policy else None,
        )

    def redrive(self, destination: str, *, by_sqs: bool) -> Redriven:
        """Move a dead-letter queue's messages back."""
        there = self._there(destination)
        policy = redrive_policy(there.attributes)
        if policy is None:
            why = "messages that nobody could read stay in it; set dead_letter_queue= and max_receive_count="
            raise self._missing(f"for dead letters of {there.name}", why=why)
        dead = self._dead_letter(policy[0])
        if dead is None:
            raise self._missing(policy[0].rsplit(":", 1)[-1])
        arn = there.attributes["QueueArn"]
        with translated(self.conn_id, f"move messages of {dead.name} back to {there.name}"):
            task = start_task(self.client, dead.url, policy[0], arn) if by_sqs else None
            if task is not None:
                return Redriven(task=task)
            return Mover(self.client, self.poster(), dead.url, there.url, arn).run()

    def _there(self, destination: str) -> Found:
        if found := self.queues.look(destination):
            return found
        raise self.queues.directory.missing(destination)

    def _dead_letter(self, arn: str) -> Found | None:
        """Return the queue of an ARN; it need not have the connection's prefix."""
        account, name = arn.split(":")[-2:]
        with translated(self.conn_id, f"look up queue {name}"):
            try:
                url = self.client.get_queue_url(QueueName=name, QueueOwnerAWSAccountId=account)["QueueUrl"]
            except ClientError as error:
                if is_missing(error):
                    return None
                raise
        attributes = self.queues.attributes(name, url)
        return None if attributes is None else Found(name, url, attributes)

    def _missing(self, name: str, *, why: str | None = None) -> TopologyError:
        finding = Finding(state=State.MISSING, resource=queues.resource(name), why=why)
        return TopologyError(self.conn_id, TopologyReport((finding,)))
