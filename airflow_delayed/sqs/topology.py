"""The queues of a connection: made, compared and repaired."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from botocore.exceptions import ClientError

from airflow_delayed.delivery import Finding, State
from airflow_delayed.errors import LimitExceeded
from airflow_delayed.sqs import compare, queues
from airflow_delayed.sqs.compare import Attributes, Difference
from airflow_delayed.sqs.directory import Directory
from airflow_delayed.sqs.entries import MAX_BYTES
from airflow_delayed.sqs.faults import is_missing, translated
from airflow_delayed.sqs.life import expiry_risk, stage
from airflow_delayed.sqs.settings import QueueSettings

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient

#: Stands for the ARN of a dead-letter queue that is only planned.
_PLANNED = "planned"


@dataclass(frozen=True, slots=True)
class Found:
    """A queue that is there."""

    name: str
    url: str
    attributes: Attributes


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """What is done about what is missing or differs; by default nothing."""

    make_delay_queues: bool = False
    #: Destinations, and their dead-letter queues.
    make_others: bool = False
    repair: bool = False
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class Queues:
    """Asks SQS about queues, and changes them."""

    conn_id: str
    client: SQSClient
    directory: Directory

    def look(self, destination: str, fifo: bool = False) -> Found | None:
        """Return a queue with its settings and counts, or None if it does not exist."""
        name, url = self.directory.name(destination, fifo), self.directory.url(destination, fifo)
        if url is None:
            return None
        attributes = self.attributes(name, url)
        if attributes is None:
            self.directory.forget(destination, fifo)
            return None
        return Found(name, url, attributes)

    def largest(self, destination: str) -> int:
        """Return the bytes of the largest message that both the delay queue and the destination take."""
        both = [found for fifo in (True, False) if (found := self.look(destination, fifo))]
        return min((int(one.attributes.get("MaximumMessageSize", MAX_BYTES)) for one in both), default=MAX_BYTES)

    def attributes(self, name: str, url: str) -> Attributes | None:
        """Return a queue's settings and counts, or None if it does not exist."""
        with translated(self.conn_id, f"read the settings of queue {name}"):
            try:
                answer = self.client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
            except ClientError as error:
                if is_missing(error):
                    return None
                raise
        return {str(key): value for key, value in answer.items()}

    def install(self, destinations: Iterable[str], settings: QueueSettings, mode: Mode, *, far: bool) -> list[Finding]:
        """Compare queues, and make and repair what ``mode`` says.

        :param far: delay queues too.
        :raises LimitExceeded: a destination is a FIFO queue.
        """
        names = list(dict.fromkeys(destinations))
        for destination in names:
            if destination.endswith(queues.FIFO):
                raise LimitExceeded(
                    "destination", f"{destination} is a FIFO queue, whose messages cannot have delays of their own"
                )
        found = {destination: self.look(destination) for destination in names}
        findings, target = self._dead_letter(settings, mode, found.values()) if names else ([], None)
        for destination, there in found.items():
            findings += self._destination(destination, there, settings, mode, target)
            if far:
                findings += self.delay_queue(destination, settings, mode)
            if there and mode == Mode() and (risk := expiry_risk(stage(there.name, there.attributes))):
                findings.append(
                    Finding(
                        state=State.WARNING, resource=queues.resource(there.name), found=risk, destination=destination
                    )
                )
        return findings

    def delay_queue(self, destination: str, settings: QueueSettings, mode: Mode) -> list[Finding]:
        """Compare, make or repair the delay queue of one destination."""
        there = self.look(destination, True)
        if there is None:
            name = self.directory.name(destination, True)
            if mode.make_delay_queues:
                return [self._create(name, compare.delay_queue_attributes(settings), destination, mode)]
            # a delay queue that is missing does not make its destination a missing one
            why = f"what is due in over {queues.MAX_DELAY} s waits in it; {compare.STORE_INSTEAD}"
            return [Finding(state=State.MISSING, resource=queues.resource(name), why=why)]
        findings = self._mend(there, compare.compare_delay_queue(there.attributes, settings), destination, mode)
        if findings[0].state is State.DIFFERS:
            findings[0] = replace(findings[0], why=f"{findings[0].why}; {compare.STORE_INSTEAD}")
        return findings

    def _destination(
        self, destination: str, there: Found | None, settings: QueueSettings, mode: Mode, target: str | None
    ) -> list[Finding]:
        if there is None:
            name = self.directory.name(destination, False)
            if mode.make_others:
                return [self._create(name, compare.destination_attributes(settings, target), destination, mode)]
            return [Finding(state=State.MISSING, resource=queues.resource(name), destination=destination)]
        dead_letter = settings.dead_letter_queue and self.directory.name(settings.dead_letter_queue, False)
        differences = compare.compare_destination(there.attributes, settings, dead_letter=dead_letter, target=target)
        return self._mend(there, differences, destination, mode)

    def _dead_letter(
        self, settings: QueueSettings, mode: Mode, destinations: Iterable[Found | None]
    ) -> tuple[list[Finding], str | None]:
        """Return also the ARN of the dead-letter queue, if there is one."""
        wanted = settings.dead_letter_queue
        if wanted is None:
            return [], None
        there, name = self.look(wanted), self.directory.name(wanted, False)
        if there is None:
            if not mode.make_others:
                return [Finding(state=State.MISSING, resource=queues.resource(name))], None
            made = self._create(name, compare.dead_letter_attributes(settings), None, mode)
            there = None if mode.dry_run else self.look(wanted)
            return [made], there.attributes["QueueArn"] if there else _PLANNED
        kept = [int(one.attributes["MessageRetentionPeriod"]) for one in destinations if one]
        retention = settings.seconds("retention") or max(kept, default=queues.RETENTION)
        differences = compare.compare_dead_letter_queue(there.attributes, settings, destination_retention=retention)
        return self._mend(there, differences, None, mode), there.attributes["QueueArn"]

    def _create(self, name: str, attributes: Attributes, destination: str | None, mode: Mode) -> Finding:
        if not mode.dry_run:
            with translated(self.conn_id, f"create queue {name}"):
                self.client.create_queue(QueueName=name, Attributes=dict(attributes))  # type: ignore[arg-type]
        state = State.PLANNED if mode.dry_run else State.CREATED
        return Finding(state=state, resource=queues.resource(name), destination=destination)

    def _mend(
        self, there: Found, differences: Sequence[Difference], destination: str | None, mode: Mode
    ) -> list[Finding]:
        if not differences:
            return [Finding(state=State.OK, resource=queues.resource(there.name), destination=destination)]
        changes = {name: value for one in differences for name, value in one.attributes.items()} if mode.repair else {}
        if changes and not mode.dry_run:
            with translated(self.conn_id, f"change the settings of queue {there.name}"):
                self.client.set_queue_attributes(QueueUrl=there.url, Attributes=changes)  # type: ignore[arg-type]
        done = State.WOULD_REPAIR if mode.dry_run else State.REPAIRED
        return [
            one.finding(there.name, destination, done if mode.repair and one.attributes else State.DIFFERS)
            for one in differences
        ]
