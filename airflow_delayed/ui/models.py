"""The requests and the answers of the API; answers are made from what a store reports. Nothing is called here.

All times are ISO 8601 with a zone; ``at`` is the clock of the database or of the broker's client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal
from unicodedata import category

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints, model_validator

from airflow_delayed.criteria import one_of
from airflow_delayed.delivery import Finding
from airflow_delayed.fields import MAX_TAG
from airflow_delayed.identity import MAX_NAME, Origin, SentBy
from airflow_delayed.store.api import (
    DISPATCHED,
    MAX_BECAUSE,
    NAMES_HOSTS,
    AuditRecord,
    DeliveredMessage,
    StoreCondition,
    StoreCounts,
)
from airflow_delayed.store.policy import MAX_DESTINATION
from airflow_delayed.store.records import Content, Remembered, StoredMessage, place_of
from airflow_delayed.store.schema import MAX_ERROR, MAX_ID

if TYPE_CHECKING:
    # Python 3.10 does not have it
    from typing_extensions import Self

#: Characters of a header's value that are shown.
MAX_VALUE = 2000
#: Replaces the reason of a failure for users without the right to read the connection: a broker's text may name a
#: virtual host, a login or an address.
HIDDEN = "hidden; users who may read the connection see the reason"
WHO_SEES_WHY = "users who may read the connection see why"
#: Control characters that text may have.
_LAYOUT = "\t\n\r"

ConnectionKind = Literal["store", "rabbitmq", "sqs"]
StateName = Literal["waiting", "due", "in flight", "retrying", "failed", "expired"]
LeftName = Literal["dispatched", "cancelled"]

#: Messages that one change names.
MAX_IDS = 1000

#: Text without null characters, which no database stores and a driver would refuse.
_Text = Annotated[str, StringConstraints(min_length=1, pattern=r"^[^\x00]*$")]
MessageId = Annotated[_Text, StringConstraints(max_length=MAX_ID)]
_Name = Annotated[_Text, StringConstraints(max_length=MAX_NAME)]
Because = Annotated[str, StringConstraints(max_length=MAX_BECAUSE)]


def _token(value: str) -> str:
    place_of(value)
    return value


#: The place where a list goes on.
_After = Annotated[str, StringConstraints(max_length=2000), AfterValidator(_token)]


def _check_not_null(body: BaseModel, names: Iterable[str]) -> None:
    """Check that no criterion is null: its client had no value for it, and more messages would match without it."""
    for name in body.model_fields_set.intersection(names):
        if getattr(body, name) is None:
            raise ValueError(
                f"{name} is null, which would select more messages, so nothing is changed; to select whatever the"
                f" {name} is, leave it out"
            )


#: The criteria that name the task which stored a message.
_SENDER = ("dag_id", "run_id", "task_id", "map_index")


class FilterBody(BaseModel):
    """Criteria that select messages; texts are compared byte by byte, times have a zone."""

    model_config = ConfigDict(extra="forbid")

    tag: _Text | None = Field(default=None, max_length=MAX_TAG)
    destination: _Text | None = Field(default=None, max_length=MAX_DESTINATION)
    reason: _Text | None = Field(
        default=None,
        max_length=MAX_ERROR,
        description="last_error is exactly this; needs the right to read the connection",
    )
    due_from: AwareDatetime | None = Field(default=None, description="Due then or later")
    due_until: AwareDatetime | None = Field(default=None, description="Due before then")
    state: list[StateName] | None = Field(default=None, min_length=1)
    dag_id: _Name | None = Field(default=None, description="Sent by this DAG; the three below need it")
    run_id: _Name | None = None
    task_id: _Name | None = None
    map_index: int | None = Field(default=None, ge=-1, le=2**31 - 1)

    @model_validator(mode="after")
    def _of_a_dag(self) -> FilterBody:
        _check_not_null(self, FilterBody.model_fields)
        if self.dag_id is None and (self.run_id, self.task_id, self.map_index) != (None, None, None):
            raise ValueError("run_id, task_id and map_index need dag_id")
        return self

    def criteria(self) -> dict[str, Any]:
        """Return the arguments of the store's hook."""
        return _criteria(self.model_dump(exclude_none=True, include={*FilterBody.model_fields}))


def _criteria(values: dict[str, Any]) -> dict[str, Any]:
    sender = {name: values.pop(name) for name in _SENDER if name in values}
    return {**values, "sent_by": SentBy(**sender)} if sender else values


class PausedBody(BaseModel):
    """What is paused, one of both; texts are compared byte by byte."""

    model_config = ConfigDict(extra="forbid")

    destination: _Text | None = Field(default=None, max_length=MAX_DESTINATION)
    deliver_conn_id: _Name | None = Field(
        default=None, description="Delivered by this connection; the store's own for its queue tables"
    )

    @model_validator(mode="after")
    def _one(self) -> PausedBody:
        _check_not_null(self, PausedBody.model_fields)
        if (self.destination is None) == (self.deliver_conn_id is None):
            raise ValueError("give destination or deliver_conn_id")
        return self

    def criteria(self) -> dict[str, str]:
        """Return the arguments of the store's hook."""
        return self.model_dump(exclude_none=True)


class CancelledFilterBody(FilterBody):
    """Criteria that may select cancelled messages too, for as long as they can be restored."""

    state: list[StateName] | list[Literal["cancelled"]] | None = Field(  # type: ignore[assignment]
        default=None, min_length=1
    )


class ListQuery(FilterBody):
    """The query of a list; messages that have left the store are listed apart from those in it."""

    state: list[StateName] | list[LeftName] | None = Field(default=None, min_length=1)  # type: ignore[assignment]
    id: list[MessageId] | None = Field(default=None, max_length=MAX_IDS)
    after: _After | None = Field(default=None, description="The last answer's next")
    limit: int = Field(default=50, ge=1, le=200)


class ChangeBody(BaseModel):
    """A change of messages, selected by ids or by a filter, not both; a filter has at least one criterion."""

    model_config = ConfigDict(extra="forbid")

    ids: list[MessageId] | None = Field(default=None, min_length=1, max_length=MAX_IDS)
    filter: FilterBody | None = None
    dry_run: bool = Field(description="Change nothing, and report what would happen")
    most: int | None = Field(
        default=None, ge=1, description="Of a filter: look at no more than so many, such as a dry run has counted"
    )
    after: str | None = Field(
        default=None, max_length=2000, description="Of a filter: go on there, with the last answer's next"
    )
    audit: str | None = Field(
        default=None, pattern=r"^\d{1,18}$", description="With after: add to this row of the audit, the first answer's"
    )
    because: Because | None = Field(default=None, description="The reason, for the audit")

    @model_validator(mode="after")
    def _one_of(self) -> ChangeBody:
        _check_not_null(self, ["ids"])
        one_of(ids=self.ids, filter=self.filter)
        if self.filter is None and (self.most, self.after, self.audit) != (None, None, None):
            raise ValueError("most, after and audit are for a filter")
        if self.filter is not None and not self.filter.model_dump(exclude_none=True):
            raise ValueError("filter: give at least one criterion")
        return self


class EraseBody(ChangeBody):
    """A change that reaches cancelled messages too."""

    filter: CancelledFilterBody | None = None


class RestoreBody(EraseBody):
    """A change that takes cancels back."""

    overdue_ok: bool = Field(
        default=False, description="Also messages whose due time has passed; they are dispatched at once"
    )


class RescheduleBody(ChangeBody):
    """A change of due times: to a time, or to a delay from now, not both."""

    due_at: AwareDatetime | None = Field(
        default=None, description="With a zone; a time in the past is dispatched at once"
    )
    delay_seconds: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="From now on",
    )

    @model_validator(mode="after")
    def _when(self) -> RescheduleBody:
        one_of(due_at=self.due_at, delay_seconds=self.delay_seconds)
        return self


class RedriveBody(BaseModel):
    """A redrive: messages that could not be delivered are moved back."""

    model_config = ConfigDict(extra="forbid")

    dry_run: bool = Field(description="Move nothing, and report how many there are")


class RedriveUnroutableBody(RedriveBody):
    """A redrive of unroutable messages, to named destinations alone: a message may name any destination."""

    destinations: list[_Text] | None = Field(
        default=None, min_length=1, max_length=MAX_IDS, description="Names from the list of a dry run"
    )

    @model_validator(mode="after")
    def _names_them(self) -> RedriveUnroutableBody:
        if not self.dry_run and self.destinations is None:
            raise ValueError("destinations: name those to send to; a dry run lists them")
        return self


class ApiModel(BaseModel):
    """The base of all answers, made from objects with these attributes; a mismatch puts no value into a log."""

    model_config = ConfigDict(from_attributes=True, hide_input_in_errors=True)


class ConnectionRights(ApiModel):
    """What this user may do with a connection."""

    read: bool = Field(description="See bodies and the values of headers: the right to read the connection")
    edit: bool = Field(description="Cancel, restore, reschedule, retry, erase, redrive: may edit the connection")


class Bar(ApiModel):
    """How many messages fall due in one minute or hour, from ``begin`` on; the first counts from now."""

    begin: datetime
    messages: int


class DispatcherResponse(ApiModel):
    """A dispatcher that works, or worked within a day. ``ended_at`` null: it still works, or was killed."""

    dispatcher: str
    conn_ids: list[str | None] = Field(description="Connections it delivers through; null: the store's queue tables")
    started_at: datetime
    seen_at: datetime
    ended_at: datetime | None
    at_work: bool = Field(description="It has not ended, and gave a sign of life lately")
    worked_at: datetime | None = Field(description="When it last claimed, settled or delivered messages")
    problem: str | None = Field(description="What keeps it from working, since when; null: nothing")
    host: str | None = Field(description="The machine that it runs on")
    dag_id: str | None = Field(description="The DAG whose task it is; null: it is no task")

    def without_hosts(self, may_see: Callable[[str], bool]) -> Self:
        """Return the same for users who may not read the connection, see :meth:`StoreHealth.without_hosts`."""
        dag_id = self.dag_id if self.dag_id is None or may_see(self.dag_id) else HIDDEN
        hidden = {name: HIDDEN for name in ("problem", "host") if getattr(self, name) is not None}
        return self.model_copy(update={**hidden, "dag_id": dag_id})


class FindingResponse(ApiModel):
    """A condition that an operator should know."""

    code: str = Field(description="A short name that stays the same, such as ``no-dispatcher``")
    severity: str = Field(description="``error``, ``warning`` or ``unknown``")
    where: str
    what: str
    remedy: str | None = Field(description="What to do")
    deliver_conn_id: str | None = Field(default=None, description="The connection that delivers what it keeps")
    destination: str | None = Field(default=None, description="The destination whose messages it keeps")
    since: datetime | None = Field(default=None, description="Since when it is so")
    why: str | None = Field(default=None, description="What happens because of it; a part of ``what``")

    @classmethod
    def of(cls, finding: Finding) -> Self:
        """Return a finding."""
        more = {name: getattr(finding, name) for name in ("deliver_conn_id", "destination", "since", "why")}
        return cls.model_validate({**finding.to_json(), **more})

    def without_details(self) -> Self:
        """Return the same for users who may not read the connection."""
        return self.model_copy(update={"what": f"{self.code}; {WHO_SEES_WHY}", "remedy": None, "why": None})


class LatenessResponse(ApiModel):
    """How late the messages of one destination are."""

    conn_id: str = Field(description="The connection that delivers them; the store's own: a queue table")
    destination: str
    overdue: int = Field(description="Due for longer than 10 s, whoever has them; at most 10,000 of the store")
    late_seconds: float = Field(description="Of the overdue message that was due first; 0: there is none")
    dispatched: int = Field(description="In the last two minutes, of the 10,000 ids that left the store last")
    p99_seconds: float | None = Field(description="Of 100 of these, 99 were at most so late")


class StoreHealth(ApiModel):
    """What the verdict on a store is made of; it costs little, however many messages there are."""

    at: datetime = Field(description="When it was so, by the database's clock")
    age_seconds: float = Field(default=0, description="How old it is")
    next_due: datetime | None
    next_dues: dict[str, datetime] = Field(description="By connection, of the next thousand messages")
    lateness: list[LatenessResponse] = Field(description="By destination, the latest first; at most 20")
    dispatchers: list[DispatcherResponse] = Field(description="The one seen last comes first")
    findings: list[FindingResponse] = Field(description="What keeps messages from being dispatched in time")
    pauses: list[dict[str, str]] = Field(
        description="As pause and unpause take them; each has a finding, in this order"
    )

    def without_hosts(self, may_see: Callable[[str], bool]) -> Self:
        """Return the same for users who may not read the connection: without hosts, and what dispatchers wrote."""
        dispatchers = [one.without_hosts(may_see) for one in self.dispatchers]
        findings = [one.without_details() if one.code in NAMES_HOSTS else one for one in self.findings]
        return self.model_copy(update={"dispatchers": dispatchers, "findings": findings})

    @classmethod
    def of_condition(cls, connection_id: str, condition: StoreCondition, next_due: datetime | None) -> Self:
        """Return what is known of a store, without its counts."""
        return cls.model_validate(_of_condition(connection_id, condition) | {"next_due": next_due})


class StoreSummary(StoreHealth):
    """The figures of a store at the time ``at``; they are ``age_seconds`` old."""

    connection_id: str
    waiting: int
    due: int
    due_within_hour: int = Field(description="Not yet due, and due within 60 minutes")
    overdue: int = Field(description="Due for longer than 10 s, in flight and retrying ones too, but no paused ones")
    in_flight: int
    retrying: int
    failed: int
    expired: int
    remembered: int | None = Field(description="Ids of messages that are gone")
    oldest_due: datetime | None = Field(description="The due time of the message that is due for longest")
    last_dispatched: DeliveredMessage | None
    by_minute: list[Bar] = Field(description="60 minutes")
    by_hour: list[Bar] = Field(description="24 hours")

    @classmethod
    def of(
        cls,
        connection_id: str,
        counts: StoreCounts,
        condition: StoreCondition,
        last: DeliveredMessage | None,
    ) -> Self:
        """Return the summary of a store, by counts and a condition of the same moment."""
        figures = (
            asdict(counts)
            | _of_condition(connection_id, condition)
            | {
                "connection_id": connection_id,
                "due_within_hour": sum(counts.by_minute.values()),
                "last_dispatched": last,
                "by_minute": _bars(counts.by_minute),
                "by_hour": _bars(counts.by_hour),
            }
        )
        return cls(**figures)


def _of_condition(connection_id: str, condition: StoreCondition) -> dict[str, Any]:
    return {
        "at": condition.at,
        "findings": [FindingResponse.of(one) for one in condition.findings],
        "lateness": condition.lateness,
        "dispatchers": condition.dispatchers,
        "next_dues": condition.next_due,
        "pauses": [one.arguments(connection_id) for one in condition.pauses],
    }


def _bars(counted: Mapping[datetime, int]) -> list[Bar]:
    return [Bar(begin=begin, messages=count) for begin, count in counted.items()]


class MessageResponse(ApiModel):
    """A message that is in the store: all but headers and body."""

    message_id: str
    destination: str
    due_at: datetime
    state: StateName
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
    cancellable_until: datetime | None = Field(
        default=None,
        description="Of what waits: no dispatcher takes it before then; null: unknown, or it may be taken now",
    )
    may_change: bool = Field(default=False, description="This user may cancel, reschedule and retry it")

    @classmethod
    def of(cls, stored: StoredMessage, *, reasons: bool) -> Self:
        """Return a message that is in the store."""
        message = cls.model_validate(stored)
        message.last_error = _reason(stored, shown=reasons)
        return message


def _reason(stored: StoredMessage, *, shown: bool) -> str | None:
    return stored.last_error if shown or stored.last_error is None else HIDDEN


class TombstoneResponse(ApiModel):
    """An id whose message is gone: dispatched, cancelled, purged or erased."""

    message_id: str
    state: str
    at: datetime
    destination: str | None
    due_at: datetime | None
    deliver_conn_id: str | None = Field(description="Null as well: a queue table in the store's database, or unknown")
    tag: str | None
    origin: Origin | None
    restorable_until: datetime | None = Field(description="A cancel can be taken back until then; null: it cannot")
    may_change: bool = Field(default=False, description="This user may take its cancel back")
    late_seconds: float | None = Field(description="Dispatched so many seconds after it was due; 0 if ahead of it")

    @classmethod
    def of(cls, remembered: Remembered) -> Self:
        """Return an id whose message has left the store."""
        late = None
        if remembered.state == DISPATCHED and remembered.due_at is not None:
            late = max((remembered.at - remembered.due_at).total_seconds(), 0.0)
        return cls(**asdict(remembered), late_seconds=late)


class MessagePage(ApiModel):
    """One page, ordered by due time and id; messages that have left the store are in ``remembered``, the last first."""

    at: datetime
    messages: list[MessageResponse]
    remembered: list[TombstoneResponse] = Field(
        description="Of the ids or the states that were asked for: remembered ones"
    )
    next: str | None = Field(description="Give it as after= for the next page; null: this is the last")


class HistoryEntry(ApiModel):
    """One line of a message's history."""

    at: datetime
    what: str = Field(
        description="stored, replaced, failed, expired, next try, dispatched, or a change: cancel, restore, retry, ..."
    )
    who: str | None
    detail: str | None


class AuditEntryResponse(ApiModel):
    """One recorded change of a store; it may have changed no message."""

    at: datetime
    who: str | None
    action: str
    selection: dict[str, Any] = Field(description="ids and the first five of them, or the criteria of a filter")
    counts: dict[str, int] = Field(description="How many messages by outcome")
    because: str | None = Field(description="The user's reason")

    @classmethod
    def of(cls, record: AuditRecord, *, reasons: bool) -> Self:
        """Return a recorded change."""
        entry = cls.model_validate(record)
        if not reasons and "reason" in entry.selection:
            entry.selection = {**entry.selection, "reason": HIDDEN}
        return entry


class AuditPage(ApiModel):
    """One page of a store's audit, the newest entry first."""

    entries: list[AuditEntryResponse]
    next: str | None = Field(description="Give it as after= for the next page; null: this is the last")


class MessageHeaders(ApiModel):
    """A message's headers; long values are cut."""

    names: list[str]
    values: dict[str, str | None] | None = Field(description="Null: this user may see the names only")
    cut: list[str] = Field(description="Names of the headers whose value is cut")

    @classmethod
    def of(cls, headers: Mapping[str, str], *, values: bool) -> Self:
        """Return headers by name."""
        names = sorted(headers)
        if not values:
            return cls(names=names, values=None, cut=[])
        return cls(
            names=names,
            values={name: headers[name][:MAX_VALUE] for name in names},
            cut=[name for name in names if len(headers[name]) > MAX_VALUE],
        )


class MessageDetail(ApiModel):
    """Everything that the store knows of an id, except the body; either ``message`` or ``remembered`` is null."""

    at: datetime
    message: MessageResponse | None
    remembered: TombstoneResponse | None
    headers: MessageHeaders | None = Field(description="Null: the message is gone, or its headers cannot be read")
    body_bytes: int | None
    history: list[HistoryEntry] = Field(description="Oldest first")

    @classmethod
    def of(
        cls,
        now: datetime,
        known: StoredMessage | Remembered,
        content: Content | None,
        changes: Sequence[AuditRecord],
        *,
        values: bool,
    ) -> Self:
        """Return everything that is known of an id, except its body."""
        headers = content.headers if content else None
        return cls(
            at=now,
            message=MessageResponse.of(known, reasons=values) if isinstance(known, StoredMessage) else None,
            remembered=TombstoneResponse.of(known) if isinstance(known, Remembered) else None,
            headers=None if headers is None else MessageHeaders.of(headers, values=values),
            body_bytes=content.body_bytes if content else None,
            history=history(known, changes, reasons=values),
        )


def history(known: StoredMessage | Remembered, changes: Sequence[AuditRecord], *, reasons: bool) -> list[HistoryEntry]:
    """Return the history of a message, oldest entry first."""
    entries = [_change_entry(change) for change in changes]
    if isinstance(known, Remembered):
        entries += _tombstone_entries(known, changes)
    else:
        entries += _message_entries(known, _reason(known, shown=reasons))
    return sorted(entries, key=lambda entry: entry.at)


def _message_entries(stored: StoredMessage, reason: str | None) -> list[HistoryEntry]:
    entries = []
    origin = stored.origin
    who = None
    if origin is not None:
        who = f"task {origin.dag_id}.{origin.task_id}" if origin.task_id else f"DAG {origin.dag_id}"
        who = f"{who}, run {origin.run_id}"
    stored_at, replaced_at = stored.stored_at, stored.replaced_at
    if stored_at is not None:
        entries.append(_entry(stored_at, "stored", None if replaced_at else who))
    if replaced_at is not None:
        entries.append(_entry(replaced_at, "replaced", who, "by another with the same id"))
    tries = f"{stored.retry_count} failed {'try' if stored.retry_count == 1 else 'tries'}"
    if stored.failed_at is not None:
        entries.append(_entry(stored.failed_at, stored.state.value, None, f"{tries}; {reason or 'no reason kept'}"))
    elif stored.next_try is not None:
        entries.append(_entry(stored.next_try, "next try", None, f"after {tries}: {reason}"))
    return entries


def _tombstone_entries(remembered: Remembered, changes: Sequence[AuditRecord]) -> list[HistoryEntry]:
    at, state = remembered.at, remembered.state
    if state != DISPATCHED:
        if any(change.at == at for change in changes):
            return []
        return [_entry(at, state, None, "with others; the audit of this time has the user")]
    lateness = None if remembered.due_at is None else _lateness(at - remembered.due_at)
    return [_entry(at, DISPATCHED, f"dispatcher {remembered.dispatcher}" if remembered.dispatcher else None, lateness)]


def _lateness(late: timedelta) -> str:
    seconds = late.total_seconds()
    return (
        f"{seconds:,.3f} s after it was due"
        if seconds >= 0
        else f"{-seconds:,.3f} s ahead, to be delayed by the broker"
    )


def _change_entry(change: AuditRecord) -> HistoryEntry:
    counts = ", ".join(f"{count:,} {outcome}" for outcome, count in change.counts.items())
    to = f"to {change.selection['to']}; " if "to" in change.selection else ""
    detail = f"{to}of {change.selection.get('ids', '?')} messages: {counts or 'none'}"
    return _entry(change.at, change.action, change.who, detail)


def _entry(at: datetime, what: str, who: str | None, detail: str | None = None) -> HistoryEntry:
    return HistoryEntry(at=at, what=what, who=who, detail=detail)


class MessageBody(ApiModel):
    """A body, cut at the limit. It is text if it is UTF-8 without control characters, and hexadecimal otherwise."""

    message_id: str
    bytes: int
    shown_bytes: int
    form: Literal["text", "hex"]
    content: str

    @classmethod
    def of(cls, message_id: str, content: Content) -> Self:
        """Return the beginning of a body."""
        text = text_of(content.body, whole=len(content.body) == content.body_bytes)
        return cls(
            message_id=message_id,
            bytes=content.body_bytes,
            shown_bytes=len(content.body),
            form="hex" if text is None else "text",
            content=content.body.hex() if text is None else text,
        )


def text_of(data: bytes, *, whole: bool) -> str | None:
    """Return bytes as text; None: they are not UTF-8, or have control characters.

    :param whole: False: the last character may be cut off in the middle.
    """
    for cut in range(1 if whole else 4):
        try:
            text = data[: len(data) - cut].decode()
        except UnicodeDecodeError:
            continue
        return text if all(category(character) != "Cc" or character in _LAYOUT for character in text) else None
    return None


class MessageOutcome(ApiModel):
    """The outcome of a change for one message."""

    message_id: str
    outcome: str


class OutOfReachResponse(ApiModel):
    """Messages that a connection was given before their due time: no change reaches them."""

    deliver_conn_id: str
    messages: int
    until: datetime = Field(description="The last due time")


class ChangeResponse(ApiModel):
    """The outcomes of a change; with ``dry_run`` they are predicted, and nothing is changed."""

    dry_run: bool
    matching: int = Field(description="Messages that were asked for: ids, or what the filter means")
    matching_at_least: bool = Field(description="There are more than were counted")
    total: int = Field(description="Messages that this call looked at")
    changed: int = Field(description="Those of them that it changed")
    outcomes: dict[str, int] = Field(description="How many by outcome: cancelled, dispatched, in flight, ...")
    messages: list[MessageOutcome] = Field(description="By ids: each; by filter: the first 100 of each outcome")
    next: str | None = Field(description="By filter: where more messages match than this call looked at; null: none do")
    audit: str | None = Field(description="The row of the audit; null: nothing is recorded")
    due_at: datetime | None = Field(default=None, description="Of a reschedule: the new due time")
    out_of_reach: list[OutOfReachResponse] = Field(
        description="Messages of the selection that were dispatched and are not due yet, by connection"
    )
    out_of_reach_at_least: bool = Field(description="There may be more: the latest tombstones were looked at")
