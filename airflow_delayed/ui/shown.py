"""What a store says, as the API answers it. Nothing is asked here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from unicodedata import category

from airflow_delayed.store.audit import AuditRecord
from airflow_delayed.store.content import Content
from airflow_delayed.store.counts import StoreCounts
from airflow_delayed.store.dispatched import Dispatched
from airflow_delayed.store.leases import HANDED_OVER
from airflow_delayed.store.listing import DispatcherSeen
from airflow_delayed.store.stored import Remembered, StoredMessage
from airflow_delayed.ui import models

#: Characters of a header's value.
VALUE = 2000
#: Control characters that text may have.
_LAYOUT = "\t\n\r"


def summary(
    connection_id: str, counts: StoreCounts, last: Dispatched | None, dispatchers: Sequence[DispatcherSeen]
) -> models.StoreSummary:
    """Return how a store stands."""
    return models.StoreSummary(
        connection_id=connection_id,
        at=counts.at,
        age_seconds=0,
        waiting=counts.waiting,
        due=counts.due,
        due_within_hour=sum(counts.by_minute.values()),
        overdue=counts.overdue,
        in_flight=counts.in_flight,
        retrying=counts.retrying,
        failed=counts.failed,
        expired=counts.expired,
        remembered=counts.remembered,
        next_due=counts.next_due,
        oldest_due=counts.oldest_due,
        last_dispatched=None
        if last is None
        else models.Dispatched(
            at=last.at, message_id=last.message_id, destination=last.destination, dispatcher=last.dispatcher
        ),
        dispatchers=[
            models.DispatcherShown(
                dispatcher=one.dispatcher,
                conn_ids=list(one.conn_ids),
                started_at=one.started_at,
                seen_at=one.seen_at,
                ended_at=one.ended_at,
            )
            for one in dispatchers
        ],
        by_minute=_bars(counts.by_minute),
        by_hour=_bars(counts.by_hour),
    )


def _bars(counted: Mapping[datetime, int]) -> list[models.Bar]:
    return [models.Bar(begin=begin, messages=many) for begin, many in counted.items()]


#: Stands for the reason of a failure before a user who may not read the connection: a broker's text may name a virtual
#: host, a login or an address.
HIDDEN = "hidden; who may read the connection sees the reason"


def message(one: StoredMessage, *, reasons: bool) -> models.Message:
    """Return a message that is in the store.

    :param reasons: show why it failed.
    """
    origin = one.origin
    return models.Message(
        message_id=one.message_id,
        destination=one.destination,
        due_at=one.due_at,
        state=one.state.value,
        deliver_conn_id=one.deliver_conn_id,
        tag=one.tag,
        expires_at=one.expires_at,
        retry_count=one.retry_count,
        next_try=one.next_try,
        last_error=_last_error(one, reasons=reasons),
        stored_at=one.stored_at,
        replaced_at=one.replaced_at,
        failed_at=one.failed_at,
        origin=None
        if origin is None
        else models.Origin(
            dag_id=origin.dag_id,
            run_id=origin.run_id,
            task_id=origin.task_id,
            map_index=origin.map_index,
            iteration=origin.iteration,
        ),
    )


def _last_error(one: StoredMessage, *, reasons: bool) -> str | None:
    return one.last_error if reasons or one.last_error is None else HIDDEN


def remembered(one: Remembered) -> models.Remembered:
    """Return what is remembered of a message that is gone."""
    late = None
    if one.state == HANDED_OVER and one.due_at is not None:
        late = max((one.at - one.due_at).total_seconds(), 0.0)
    return models.Remembered(
        message_id=one.message_id,
        state=one.state,
        at=one.at,
        destination=one.destination,
        due_at=one.due_at,
        late_seconds=late,
    )


def detail(
    now: datetime,
    known: StoredMessage | Remembered,
    content: Content | None,
    changes: Sequence[AuditRecord],
    *,
    values: bool,
) -> models.MessageDetail:
    """Return all that is known of an id but its body.

    :param values: show the values of headers, and why the message failed.
    """
    there = isinstance(known, StoredMessage)
    return models.MessageDetail(
        at=now,
        message=message(known, reasons=values) if isinstance(known, StoredMessage) else None,
        remembered=remembered(known) if isinstance(known, Remembered) else None,
        headers=_headers(content.headers, values=values) if there and content and content.headers is not None else None,
        body_bytes=content.body_bytes if content else None,
        history=history(known, changes, reasons=values),
    )


def _headers(headers: Mapping[str, str], *, values: bool) -> models.Headers:
    names = sorted(headers)
    if not values:
        return models.Headers(names=names, values=None, cut=[])
    return models.Headers(
        names=names,
        values={name: headers[name][:VALUE] for name in names},
        cut=[name for name in names if len(headers[name]) > VALUE],
    )


def history(
    known: StoredMessage | Remembered, changes: Sequence[AuditRecord], *, reasons: bool
) -> list[models.Happening]:
    """Return what happened to a message, oldest first.

    :param reasons: show why it failed.
    """
    lines = [_changed(one) for one in changes]
    if isinstance(known, Remembered):
        lines += _gone(known, changes)
    else:
        lines += _stood(known, _last_error(known, reasons=reasons))
    return sorted(lines, key=lambda line: line.at)


def _stood(known: StoredMessage, reason: str | None) -> list[models.Happening]:
    lines = []
    origin = known.origin
    who = f"task {origin.dag_id}.{origin.task_id}, run {origin.run_id}" if origin else None
    stored_at, replaced_at = known.stored_at, known.replaced_at
    if stored_at is not None:
        lines.append(_line(stored_at, "stored", None if replaced_at else who))
    if replaced_at is not None:
        lines.append(_line(replaced_at, "replaced", who, "by another with the same id"))
    tries = f"{known.retry_count} failed {'try' if known.retry_count == 1 else 'tries'}"
    if known.failed_at is not None:
        lines.append(_line(known.failed_at, known.state.value, None, f"{tries}; {reason or 'no reason kept'}"))
    elif known.next_try is not None:
        lines.append(_line(known.next_try, "next try", None, f"after {tries}: {reason}"))
    return lines


def _gone(known: Remembered, changes: Sequence[AuditRecord]) -> list[models.Happening]:
    if known.state != HANDED_OVER:
        if any(one.at == known.at for one in changes):
            return []
        return [_line(known.at, known.state, None, "with others; the audit of this time tells by whom")]
    lateness = None
    if known.due_at is not None:
        lateness = _lateness(known.at - known.due_at)
    return [_line(known.at, HANDED_OVER, f"dispatcher {known.dispatcher}" if known.dispatcher else None, lateness)]


def _lateness(late: timedelta) -> str:
    seconds = late.total_seconds()
    return (
        f"{seconds:,.3f} s after it was due"
        if seconds >= 0
        else f"{-seconds:,.3f} s ahead, to be delayed by the broker"
    )


def _changed(one: AuditRecord) -> models.Happening:
    counts = ", ".join(f"{many:,} {outcome}" for outcome, many in one.counts.items())
    to = f"to {one.selection['to']}; " if "to" in one.selection else ""
    return _line(one.at, one.action, one.who, f"{to}of {one.selection.get('ids', '?')} messages: {counts or 'none'}")


def _line(at: datetime, what: str, who: str | None, told: str | None = None) -> models.Happening:
    return models.Happening(at=at, what=what, who=who, detail=told)


def body(message_id: str, content: Content) -> models.Body:
    """Return the beginning of a body: text if it is UTF-8 without control characters, and hexadecimal otherwise."""
    text = text_of(content.body, whole=len(content.body) == content.body_bytes)
    return models.Body(
        message_id=message_id,
        bytes=content.body_bytes,
        shown_bytes=len(content.body),
        form="hex" if text is None else "text",
        content=content.body.hex() if text is None else text,
    )


def text_of(data: bytes, *, whole: bool) -> str | None:
    """Return bytes as text; None: they are none.

    :param whole: False: the last character may be cut off in the middle.
    """
    for cut in range(1 if whole else 4):
        try:
            text = data[: len(data) - cut].decode()
        except UnicodeDecodeError:
            continue
        return text if all(category(one) != "Cc" or one in _LAYOUT for one in text) else None
    return None
