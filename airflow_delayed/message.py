"""The delayed message, and the arithmetic of delays and due times.

Promise: never early. Whatever is rounded here is rounded up.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from decimal import MAX_EMAX, MIN_EMIN, ROUND_CEILING, Context, Decimal, InvalidOperation, Overflow
from itertools import repeat
from typing import TYPE_CHECKING, Any, NoReturn

from airflow_delayed.clock import utcnow as utcnow
from airflow_delayed.errors import InvalidMessage, NaiveTime, short
from airflow_delayed.fields import FIELD_NAMES

UTC = timezone.utc
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
_SECOND = timedelta(seconds=1)

#: Longest message id, in characters: what Amazon SQS allows as MessageDeduplicationId.
MAX_ID_LENGTH = 128
#: A time as ISO 8601 writes it, with or without the marks between its numbers, or with a space for the T. Not what
#: ``datetime.fromisoformat`` takes, which is more in each release of Python.
_CLOCK = "([01][0-9]|2[0-3])(?::?([0-5][0-9])(?::?([0-5][0-9])(?:[.,]([0-9]+))?)?)?"
_TIME = re.compile(f"([0-9]{{4}})(-?)([0-9]{{2}})\\2([0-9]{{2}})[Tt ]{_CLOCK}(?:[Zz]|([+-]){_CLOCK})?")
#: For seconds as text: exact, whatever the caller's own context is.
_EXACT = Context(prec=40, rounding=ROUND_CEILING, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[InvalidOperation, Overflow])
_SIX_DIGITS = Decimal("0.000001")
_NUMBER = "([0-9]+(?:[.,][0-9]+)?)"
#: An ISO 8601 duration. Pendulum does not read it here: Spark's executors lack it, and it makes some delays shorter. It
#: reads PT4294967296S as no time at all, and leaves out what is finer than a microsecond.
_DURATION = re.compile(f"P(?:{_NUMBER}W)?(?:{_NUMBER}D)?(?:T(?:{_NUMBER}H)?(?:{_NUMBER}M)?(?:{_NUMBER}S)?)?")
#: The seconds of its numbers.
_UNITS = tuple(map(Decimal, (604_800, 86_400, 3600, 60, 1)))
_ID = re.compile(f"[!-~]{{1,{MAX_ID_LENGTH}}}")
#: The headers of a trace's context (W3C Trace Context).
TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
#: NServiceBus: an endpoint starts a trace of its own for this message, with a link to the sender's.
START_NEW_TRACE = "NServiceBus.OpenTelemetry.StartNewTrace"
TRACE_HEADERS = {TRACEPARENT, TRACESTATE, START_NEW_TRACE}


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayedMessage:
    """One message and when it is due.

    :param destination: the queue that receives it, in its transport's own naming.
    :param body: the content, as bytes; like the headers, never shown when the message is printed.
    :param due_at: aware; kept in UTC with microseconds. It is never delivered before it.
    :param message_id: 1 to 128 printable ASCII characters without blanks, the same on every retry of the same send.
    :param headers: text by text.
    :param tag: a name to cancel by, such as a customer or an order.
    :param expires_at: aware and after ``due_at``; the message is not dispatched from a store after it.
    :param trace: headers of the trace that the message belongs to, see ``airflow_delayed.trace.current_trace()``.
        They are no part of the message: messages that differ in them alone are equal, and no id or digest has them.
    :raises InvalidMessage: a field breaks one of these rules; the error names it.
    """

    destination: str
    body: bytes = field(repr=False)
    due_at: datetime
    message_id: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    tag: str | None = None
    expires_at: datetime | None = None
    trace: Mapping[str, str] | None = field(default=None, repr=False, compare=False)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            # Airflow asks for it to keep a task's result; a method would show the body among the rendered templates too
            if name == "serialize":
                raise TypeError(
                    "a DelayedMessage cannot be the result of a task, which Airflow keeps as XCom: return it from a"
                    " function with @task.delayed_send, which sends it, or return dictionaries of text"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __post_init__(self) -> None:
        if not isinstance(self.destination, str) or not self.destination:
            raise InvalidMessage("destination", "must be the name of a queue, and is empty or not text")
        check_text("destination", self.destination)
        if not isinstance(self.body, bytes):
            raise InvalidMessage("body", f"must be bytes, not {type(self.body).__name__}")
        due_at = utc("due_at", self.due_at)
        if due_at is not self.due_at:
            object.__setattr__(self, "due_at", due_at)
        # not check_id: a call for each of millions of messages
        if not isinstance(self.message_id, str) or not _ID.fullmatch(self.message_id):
            raise _wrong_id(self.message_id)
        if self.headers != {}:
            check_headers(self.headers)
        if self.trace:
            check_headers(self.trace)
        if self.tag is not None and (not isinstance(self.tag, str) or not self.tag):
            raise InvalidMessage("tag", "must be text, or absent")
        if self.tag is not None:
            check_text("tag", self.tag)
        if self.expires_at is not None:
            object.__setattr__(self, "expires_at", utc("expires_at", self.expires_at))
            if self.expires_at <= self.due_at:
                raise InvalidMessage("expires_at", f"{self.expires_at} is not after due_at {self.due_at}")


def check_id(message_id: object) -> None:
    """Check that a value can be the id of a message.

    :raises InvalidMessage: it cannot.
    """
    if not isinstance(message_id, str) or not _ID.fullmatch(message_id):
        raise _wrong_id(message_id)


def _wrong_id(message_id: object) -> InvalidMessage:
    if not isinstance(message_id, str) or not 0 < len(message_id) <= MAX_ID_LENGTH:
        return InvalidMessage("message_id", f"must be text of 1 to {MAX_ID_LENGTH} characters")
    return InvalidMessage("message_id", f"{message_id!r} has characters other than printable ASCII without blanks")


def check_headers(headers: Mapping[str, str]) -> None:
    """Check that headers are text by text.

    :raises InvalidMessage: they are not; the error shows no value.
    """
    if not isinstance(headers, Mapping):
        raise InvalidMessage("headers", f"must be text by text, not {type(headers).__name__}")
    for name, value in headers.items():
        if not isinstance(name, str) or not name:
            raise InvalidMessage("headers", f"the name {short(name)} must be text that is not empty")
        if not isinstance(value, str):
            # the value is not shown: a header may hold a secret, which must not be in a log
            raise InvalidMessage("headers", f"the value of {short(name)} must be text, not {type(value).__name__}")
        check_text("headers", name)
        check_text("headers", value)


def check_text(column: str, text: str) -> None:
    """Check that a text can be written in UTF-8.

    :raises InvalidMessage: it holds half of a surrogate pair, as JSON can.
    """
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidMessage(column, "holds half of a surrogate pair, which UTF-8 has no bytes for") from None


def traced_headers(message: DelayedMessage, *, nservicebus: bool = False) -> Mapping[str, str]:
    """Return a message's headers, and those of its trace unless the user has set a trace among the headers.

    :param nservicebus: with ``NServiceBus.OpenTelemetry.StartNewTrace``, which NServiceBus's endpoints alone read.
    """
    own, trace = message.headers, message.trace
    if not trace or TRACEPARENT in own or TRACESTATE in own:
        return own
    return {**{name: trace[name] for name in trace if nservicebus or name != START_NEW_TRACE}, **own}


def unchecked(size: int, **fields: Iterable[Any]) -> list[DelayedMessage]:
    """Return messages from columns whose values were checked by these rules already, in a quarter of the time.

    :param fields: the fields of DelayedMessage: their values, of the types that the fields have, due times in UTC. Only
        optional fields may be left out.
    """
    messages: list[DelayedMessage] = list(map(object.__new__, repeat(DelayedMessage, size)))
    for name, values in {**dict.fromkeys((*FIELD_NAMES, "trace"), repeat(None)), **fields}.items():
        # a slot's own setter, called for all messages without a step of Python's in between
        put = getattr(DelayedMessage, name).__set__
        deque(map(put, messages, values), maxlen=0)
    return messages


def utc(column: str, moment: datetime) -> datetime:
    """Return an aware time in UTC.

    :raises NaiveTime: it has no time zone.
    :raises InvalidMessage: it is not a time, or not one of the years 1 to 9999 in UTC.
    """
    if not isinstance(moment, datetime):
        raise InvalidMessage(column, f"must be a time with a time zone, not {type(moment).__name__}")
    if type(moment) is not datetime:
        moment = _plain(column, moment)
    if moment.tzinfo is UTC:
        return moment
    if moment.utcoffset() is None:
        raise NaiveTime(column, moment)
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise InvalidMessage(column, f"{moment} lies outside the years 1 to 9999 in UTC") from None


def parse_time(column: str, value: object) -> datetime:
    """Return a time, aware or not, from a datetime or from ISO 8601 text.

    :raises InvalidMessage: it is neither.
    """
    if isinstance(value, datetime):
        return value if type(value) is datetime else _plain(column, value)
    if not isinstance(value, str):
        raise InvalidMessage(column, f"must be a time of the years 1 to 9999, not {type(value).__name__}")
    found = _TIME.fullmatch(value.strip())
    try:
        if found is None:
            raise ValueError
        year, _, month, day, hour, minute, second, fraction, sign, *offset, offset_fraction = found.groups("00")
        text = f"{year}-{month}-{day}T{hour}:{minute}:{second}.{fraction[:6]:0<6}"
        if found[9]:
            text += f"{sign}{':'.join(offset)}.{offset_fraction[:6]:0<6}"
        elif found[0][-1] in "Zz":
            text += "+00:00"
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidMessage(column, f"{short(value)} is not a time; write it as 2026-01-31T09:30:00+01:00") from None
    # .NET writes seven digits, others nine
    return _later(column, moment, sum(bool(finer[6:].strip("0")) for finer in (fraction, offset_fraction)))


def parse_moment(column: str, value: object) -> datetime:
    """Return a time in UTC from an aware datetime or from ISO 8601 text with an offset.

    :raises InvalidMessage: it is neither, or has no offset.
    """
    return utc(column, parse_time(column, value))


def _plain(column: str, moment: datetime) -> datetime:
    """Return a datetime of another library as Python's own; nanoseconds beyond a microsecond count as a whole one."""
    if moment != moment:
        raise InvalidMessage(column, "is not a time (NaT)")
    plain = datetime.combine(moment.date(), moment.time(), moment.tzinfo).replace(fold=moment.fold)
    return _later(column, plain, 1 if getattr(moment, "nanosecond", 0) else 0)


def _later(column: str, moment: datetime, count: int) -> datetime:
    if not count:
        return moment
    try:
        # an addition forgets which of two equal local times it is
        return (moment + count * MICROSECOND).replace(fold=moment.fold)
    except OverflowError:
        raise InvalidMessage(
            column, f"{moment} and a fraction of a microsecond are rounded up, which ends after the year 9999"
        ) from None


def microseconds(moment: datetime) -> int:
    """Return an aware time as whole microseconds since 1970, exactly."""
    return (moment - EPOCH) // MICROSECOND


def from_microseconds(value: int) -> datetime:
    """Return the UTC time of whole microseconds since 1970.

    :raises OverflowError: it lies outside the years 1 to 9999.
    """
    return EPOCH + timedelta(microseconds=value)


def ceil_seconds(span: timedelta) -> int:
    """Return how many whole seconds cover a span; 0 if the span is not positive."""
    return max(0, -(-span // _SECOND))


def delay_seconds(due_at: datetime, now: datetime) -> int:
    """Return the whole seconds from now until a message is due, rounded up; 0 if that is past."""
    return ceil_seconds(due_at - now)


def delay_of(value: timedelta | float | str, column: str = "delay") -> timedelta:
    """Read a relative delay: a timedelta, seconds as a number or text, or an ISO 8601 duration (``PT10M``, ``P1D``).

    Fractions are rounded up to a microsecond.

    :raises InvalidMessage: it is negative, not finite, or neither; or it has months or years.
    """
    span: timedelta | None
    if isinstance(value, timedelta):
        try:
            span = plain_span(column, value)
        except ValueError:
            raise InvalidMessage(column, f"{value} {_NO_MONTHS}") from None
    elif isinstance(value, bool) or not isinstance(value, int | float | str):
        known = "must be seconds, a timedelta, or an ISO 8601 duration such as 'PT10M'"
        raise InvalidMessage(column, f"{known}, not {type(value).__name__}")
    else:
        try:
            span = _seconds(value, column)
        except (ValueError, OverflowError, ArithmeticError):
            problem = "is neither a number of seconds nor an ISO 8601 duration such as 'PT10M' or 'P1D'"
            raise InvalidMessage(column, f"{short(value)} {problem}, or too long") from None
    if span is None or span < timedelta(0):
        text = str(value) if isinstance(value, timedelta) else short(value)
        raise InvalidMessage(column, f"{text} is negative; a message cannot be sent into the past")
    return span


_NO_MONTHS = (
    "has months or years, which are not always as long; write days, as 'P30D', or give the time at which it is due"
)


def plain_span(name: str, span: timedelta) -> timedelta:
    """Return a duration of any library, such as pendulum's, as Python's own; nanoseconds are rounded up.

    Pendulum's do not do all that a timedelta does.

    :raises ValueError: it has months or years; the months of an interval are those between its two times.
    """
    if type(span) is timedelta:
        return span
    if not hasattr(span, "start") and (getattr(span, "years", False) or getattr(span, "months", False)):
        raise ValueError(f"{name}={span} {_NO_MONTHS}")
    plain = timedelta(*(getattr(timedelta, part).__get__(span) for part in ("days", "seconds", "microseconds")))
    return plain + MICROSECOND if getattr(span, "nanoseconds", 0) else plain


def _seconds(value: int | float | str, column: str) -> timedelta | None:
    """Return seconds, or a duration as text, as a span; or None if they are negative, however little."""
    if isinstance(value, str):
        text = value.strip()
        exact = _duration(text, column) if text.lstrip("+-")[:1] == "P" else Decimal(text)
        if not exact.is_finite():
            raise ValueError
        if exact < 0:
            return None
        return timedelta(microseconds=int(_EXACT.scaleb(_EXACT.quantize(exact, _SIX_DIGITS), 6)))
    if value < 0:
        return None
    if isinstance(value, int):
        return timedelta(seconds=value)
    whole = int(value * 1_000_000)
    if whole / 1_000_000 < value:
        whole += 1
    return timedelta(microseconds=whole)


def _duration(text: str, column: str) -> Decimal:
    """Return the seconds of an ISO 8601 duration, -1 of a negative one."""
    if "-" in text:
        return Decimal(-1)
    if re.search("[0-9][YM]", text.partition("T")[0]):
        raise InvalidMessage(column, f"{short(text)} {_NO_MONTHS}")
    parts = _DURATION.fullmatch(text)
    if parts is None or text[-1] in "PT":
        raise ValueError
    seconds = Decimal(0)
    for number, unit in zip(parts.groups("0"), _UNITS, strict=True):
        seconds = _EXACT.fma(Decimal(number.replace(",", ".")), unit, seconds)
    return seconds


def due_after(anchor: datetime | None, delay: timedelta, column: str = "delay") -> datetime:
    """Return the due time of a relative delay, counted from its anchor.

    :param anchor: None: it is not known any more.
    :raises InvalidMessage: it lies beyond the year 9999, or cannot be known.
    """
    if anchor is None:
        raise InvalidMessage(
            column,
            "counts from when the task's first try began, which this try does not know: Airflow before 3.3 does not"
            " keep it, and from 3.4 on a clear deletes it unless 'keep task state' (keep_task_state) is chosen, and"
            " replaces the iterations of a task loop. Pass that moment as delay_from= (the first try logged it as"
            " 'relative delays count from ...'): it gives the same due times and ids, so that nothing comes twice."
            " Another delay_from=, or on_clear='new_ids', sends again what was sent",
        )
    try:
        return anchor + delay
    except OverflowError:
        raise InvalidMessage(column, f"{delay} from {anchor} ends after the year 9999") from None
