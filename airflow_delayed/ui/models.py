"""What the API answers. All times are ISO 8601 with a zone; ``at`` is the clock of the database or broker's client."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Kind = Literal["store", "rabbitmq", "sqs"]


Code = Literal[
    "login",
    "forbidden",
    "absent",
    "invalid",
    "cross_site",
    "not_json",
    "unreachable",
    "too_slow",
    "busy",
    "not_ready",
    "conflict",
    "internal",
    "closed",
]


class Answer(BaseModel):
    """The base of all answers; should one not be as described, no value of it comes into a log."""

    model_config = ConfigDict(hide_input_in_errors=True)


class Fault(Answer):
    """What went wrong: a word for programs, and a text for people that says what to do."""

    code: Code
    message: str


class FaultAnswer(Answer):
    """The body of each answer whose status is 400 or more."""

    error: Fault


class Rights(Answer):
    """What this user may do with a connection."""

    bodies: bool = Field(description="See bodies and the values of headers: the right to read the connection")
    act: bool = Field(description="Cancel, reschedule, retry, erase, redrive: the right to edit the connection")


class ConnectionShown(Answer):
    """One connection of the section [delayed] of Airflow's configuration."""

    connection_id: str
    kind: Kind
    queue: str | None = Field(default=None, description="Of SQS: the destination. One entry for each")
    may: Rights


class Connections(Answer):
    """All that the page shows, in the order of the configuration."""

    user: str
    version: str
    body_limit: int = Field(description="Bytes of a body that are shown at most")
    connections: list[ConnectionShown]
    hidden: bool = Field(description="Some are not shown, because the user may not read them")


class Bar(Answer):
    """How many messages fall due in one minute or hour, from ``begin`` on; the first counts from now."""

    begin: datetime
    messages: int


class DispatcherShown(Answer):
    """Who dispatches, or did within a day. ``ended_at`` null: it is at work, or was killed."""

    dispatcher: str
    conn_ids: list[str | None] = Field(description="Connections it delivers through; null: the store's queue tables")
    started_at: datetime
    seen_at: datetime
    ended_at: datetime | None


class Dispatched(Answer):
    """The message that was handed over last."""

    at: datetime
    message_id: str
    destination: str | None
    dispatcher: str | None


class StoreSummary(Answer):
    """How a store stands, at ``at``; the figures are ``age_seconds`` old."""

    connection_id: str
    at: datetime
    age_seconds: float
    waiting: int
    due: int
    due_within_hour: int = Field(description="Not yet due, and due within 60 minutes")
    overdue: int = Field(description="Due for longer than a minute, and not taken; counted in ``due`` too")
    in_flight: int
    retrying: int
    failed: int
    expired: int
    remembered: int | None = Field(description="Ids of messages that are gone")
    next_due: datetime | None
    oldest_due: datetime | None = Field(description="The due time of the message that is due for longest")
    last_dispatched: Dispatched | None
    dispatchers: list[DispatcherShown] = Field(description="The one seen last comes first")
    by_minute: list[Bar] = Field(description="60 minutes")
    by_hour: list[Bar] = Field(description="24 hours")


State = Literal["waiting", "due", "in flight", "retrying", "failed", "expired"]


class Origin(Answer):
    """The task that sent it. ``map_index`` is -1 unless the task was mapped; ``iteration`` is that of a task loop."""

    dag_id: str
    run_id: str
    task_id: str
    map_index: int
    iteration: int | None


class Message(Answer):
    """A message that is in the store: all but headers and body."""

    message_id: str
    destination: str
    due_at: datetime
    state: State
    deliver_conn_id: str | None = Field(description="Null: the destination is a queue table in the store's database")
    tag: str | None
    expires_at: datetime | None
    retry_count: int
    next_try: datetime | None
    last_error: str | None
    stored_at: datetime | None
    replaced_at: datetime | None
    failed_at: datetime | None
    origin: Origin | None


class Remembered(Answer):
    """An id whose message is gone: handed over, cancelled, purged or erased."""

    message_id: str
    state: str
    at: datetime
    destination: str | None
    due_at: datetime | None
    late_seconds: float | None = Field(description="Handed over so long after it was due; 0 if ahead of it")


class Messages(Answer):
    """One page, ordered by due time and id."""

    at: datetime
    messages: list[Message]
    remembered: list[Remembered] = Field(description="Of the ids that were asked for: those that are gone")
    next: str | None = Field(description="Give it as after= for the next page; null: this is the last")


class Happening(Answer):
    """One line of a message's history."""

    at: datetime
    what: str = Field(
        description="stored, replaced, failed, expired, tried, handed over, cancelled, rescheduled, retried, erased..."
    )
    who: str | None
    detail: str | None


class Headers(Answer):
    """A message's headers; of those that are long the values are cut."""

    names: list[str]
    values: dict[str, str | None] | None = Field(description="Null: this user may see the names only")
    cut: list[str] = Field(description="Names of the headers whose value is cut")


class MessageDetail(Answer):
    """All that is known of an id but the body: one of ``message`` and ``remembered`` is given."""

    at: datetime
    message: Message | None
    remembered: Remembered | None
    headers: Headers | None = Field(description="Null: the message is gone, or its headers cannot be read")
    body_bytes: int | None
    history: list[Happening] = Field(description="Oldest first")


class Body(Answer):
    """A body, cut at the limit. It is text if it is UTF-8 without control characters, and hexadecimal otherwise."""

    message_id: str
    bytes: int
    shown_bytes: int
    form: Literal["text", "hex"]
    content: str


class Became(Answer):
    """What became of one message."""

    message_id: str
    outcome: str


class Changed(Answer):
    """What a change did, or with ``dry_run`` would do."""

    dry_run: bool
    matching: int = Field(description="Messages that were asked for: ids, or what the filter means")
    matching_at_least: bool = Field(description="There are more than were counted")
    total: int = Field(description="Messages that this call looked at")
    changed: int = Field(description="Those of them that it changed")
    outcomes: dict[str, int] = Field(description="How many by outcome: cancelled, handed over, in flight, ...")
    messages: list[Became] = Field(description="By ids: each; by filter: the first 100 of each outcome")
    next: str | None = Field(description="By filter: there is more to do; ask again with after=")
    due_at: datetime | None = Field(default=None, description="Of a reschedule: the new due time")


class LevelShown(Answer):
    """What waits in one delay level of RabbitMQ; null: unknown, or there is no such queue."""

    level: int
    queue: str
    messages: int | None
    stuck: int | None
    earliest: datetime
    latest: datetime


class RabbitMQSummary(Answer):
    """What waits in RabbitMQ's delay levels and when it leaves; levels that are empty are left out."""

    connection_id: str
    at: datetime
    age_seconds: float
    topology: str
    messages: int
    stuck: int | None
    why_unknown: str | None
    levels: list[LevelShown]
    missing: list[str]
    unroutable_queue: str
    unroutable: int | None


class QueueShown(Answer):
    """One queue of SQS; counts are SQS's, and approximate."""

    queue: str
    waiting: int
    delayed: int
    in_flight: int
    retention_seconds: int
    visibility_timeout_seconds: int


class SqsSummary(Answer):
    """The queues that messages to one destination pass through; null: there is no such queue."""

    connection_id: str
    queue: str
    at: datetime
    age_seconds: float
    destination: QueueShown
    delay_queue: QueueShown | None
    dead_letter_queue: QueueShown | None
    max_receive_count: int | None
    risk: str | None = Field(description="Why messages could expire unread; null: nothing says so")


class Destination(Answer):
    """A destination of unroutable messages."""

    name: str
    messages: int
    problem: str | None = Field(description="Why nothing would be sent to it unless it is named")


class Redriven(Answer):
    """What became of messages that were to be moved back to their destination."""

    dry_run: bool
    waiting: int | None = Field(description="Of a dry run: how many there are")
    destinations: list[Destination] = Field(
        default=[], description="Of a dry run on RabbitMQ: what the messages that were looked at name"
    )
    moved: int
    left: dict[str, int] = Field(description="How many stayed, by reason")
    task: str | None = Field(default=None, description="Of SQS: it moves them by itself, and goes on")
