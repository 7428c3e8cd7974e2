from __future__ import annotations

import pickle
import re
from copy import copy
from datetime import datetime, timedelta, timezone
from fractions import Fraction
from importlib import import_module
from importlib.util import find_spec

import pytest
from airflow.serialization.helpers import serialize_template_field
from hypothesis import given
from hypothesis import strategies as st

from airflow_delayed.errors import InvalidMessage, NaiveTime
from airflow_delayed.message import (
    UTC,
    DelayedMessage,
    ceil_seconds,
    delay_of,
    delay_seconds,
    due_after,
    from_microseconds,
    microseconds,
    parse_moment,
    parse_time,
)

DUE = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
AWARE = st.datetimes(min_value=datetime(1970, 1, 2), max_value=datetime(9998, 1, 1), timezones=st.just(timezone.utc))


def message(**changes):
    return DelayedMessage(**{"destination": "mail", "body": b"x", "due_at": DUE, "message_id": "m-1", **changes})


def test_as_the_result_of_a_task_the_error_names_the_decorator():
    serde = next(
        import_module(name) for name in ("airflow.sdk.serde", "airflow.serialization.serde") if find_spec(name)
    )
    with pytest.raises(TypeError, match=r"@task\.delayed_send"):
        serde.serialize([message()])
    assert not hasattr(message(), "no_such_attribute")
    assert pickle.loads(pickle.dumps(message())) == copy(message()) == message()
    # among rendered templates the body is not shown
    assert "body" not in str(serialize_template_field({"names": [message(body=b"secret")]}, "op_kwargs"))


def test_due_time_is_kept_in_utc():
    berlin = timezone(timedelta(hours=1))
    assert message(due_at=datetime(2026, 3, 1, 13, 0, tzinfo=berlin)).due_at == DUE
    assert message(due_at=datetime(2026, 3, 1, 13, 0, tzinfo=berlin)).due_at.tzinfo is UTC


@pytest.mark.parametrize(
    ("changes", "column"),
    [
        ({"destination": ""}, "destination"),
        ({"body": "text"}, "body"),
        ({"due_at": "2026-03-01"}, "due_at"),
        ({"due_at": datetime(2026, 3, 1)}, "due_at"),
        ({"due_at": datetime.max.replace(tzinfo=timezone(timedelta(hours=-5)))}, "due_at"),
        ({"message_id": ""}, "message_id"),
        ({"message_id": "x" * 129}, "message_id"),
        ({"message_id": "a b"}, "message_id"),
        ({"message_id": "straße"}, "message_id"),
        ({"headers": {"n": 1}}, "headers"),
        ({"headers": {"": "v"}}, "headers"),
        ({"tag": ""}, "tag"),
        ({"expires_at": DUE}, "expires_at"),
        ({"expires_at": DUE - timedelta(seconds=1)}, "expires_at"),
    ],
)
def test_bad_field_is_named(changes, column):
    with pytest.raises(InvalidMessage) as caught:
        message(**changes)
    assert caught.value.column == column


def test_printed_message_shows_neither_body_nor_headers():
    text = repr(message(body=b"secret-body", headers={"token": "secret-header"}))
    assert "m-1" in text
    assert "secret" not in text


@given(AWARE, AWARE)
def test_delay_in_seconds_is_never_early_and_less_than_a_second_late(due, now):
    arrives = now + timedelta(seconds=delay_seconds(due, now))
    assert arrives >= due
    if due > now:
        assert arrives - due < timedelta(seconds=1)
    else:
        assert arrives == now


@given(st.timedeltas(max_value=timedelta(days=10_000)))
def test_whole_seconds_cover_the_span(span):
    seconds = ceil_seconds(span)
    assert timedelta(seconds=seconds) >= span
    assert seconds == 0 or timedelta(seconds=seconds - 1) < span


@given(st.floats(min_value=0, max_value=10**9))
def test_fraction_of_a_delay_is_rounded_up_to_a_microsecond(seconds):
    span = delay_of(seconds)
    assert span.total_seconds() >= seconds
    assert span.total_seconds() - seconds <= 2e-6


@given(AWARE)
def test_microseconds_are_exact(moment):
    assert from_microseconds(microseconds(moment)) == moment


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (90, timedelta(seconds=90)),
        ("90", timedelta(seconds=90)),
        (" 90 ", timedelta(seconds=90)),
        ("1.5", timedelta(seconds=1.5)),
        (0.1, timedelta(microseconds=100_000)),
        (timedelta(minutes=2), timedelta(minutes=2)),
        (0, timedelta(0)),
        ("PT10M", timedelta(minutes=10)),
        (" P1D ", timedelta(days=1)),
        ("P1DT2H3M4S", timedelta(days=1, hours=2, minutes=3, seconds=4)),
        ("P2W", timedelta(days=14)),
        ("P1W2D", timedelta(days=9)),
        ("P0.5D", timedelta(hours=12)),
        ("PT1,5S", timedelta(seconds=1.5)),
        ("PT0.0000001S", timedelta(microseconds=1)),
        ("PT4294967296S", timedelta(seconds=2**32)),
        ("PT0S", timedelta(0)),
    ],
)
def test_delay_is_read(value, expected):
    assert delay_of(value) == expected


@pytest.mark.parametrize(
    "value",
    [
        *(-1, "-1", timedelta(seconds=-1), "soon", float("nan"), float("inf"), True, 1e300, "1e300", "nan", "inf"),
        *(-1e-7, -1e-300, "-1e-7", "-0.0000001", "-1e-999999999", -5e-324, 10**5000, "9" * 5000, "1e999999999"),
        *("P", "PT", "P1DT", "-P1D", "P-1D", "+P1D", "pt10m", "PT10m", "P1D2H", "PT1H2D", "PT1S1S", "PT.5S", "P1.D"),
        *("PT1e3S", "PT\u0663S", "PT1M/PT2M", "10M", "PT" + "9" * 5000 + "S"),
    ],
    ids=lambda value: repr(value)[:20] if not isinstance(value, int) else "whole",
)
def test_bad_delay_is_refused(value):
    with pytest.raises(InvalidMessage, match="delay"):
        delay_of(value)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("P1M", "'P1M' has months or years, which are not always as long; write days, as 'P30D'"),
        ("P1Y2M3DT4H", "has months or years"),
        ("-PT10M", "'-PT10M' is negative"),
        ("10 minutes", "'10 minutes' is neither a number of seconds nor an ISO 8601 duration such as 'PT10M'"),
        ([], "must be seconds, a timedelta, or an ISO 8601 duration such as 'PT10M', not list"),
    ],
)
def test_a_bad_delay_says_why(value, says):
    with pytest.raises(InvalidMessage, match=re.escape(says)):
        delay_of(value)


@given(st.tuples(*[st.integers(0, 10**6)] * 4, st.decimals(0, 10**6, allow_nan=False)))
def test_a_duration_is_rounded_up_exactly(parts):
    weeks, days, hours, minutes, seconds = parts
    text = f"P{weeks}W{days}DT{hours}H{minutes}M{seconds:f}S"
    wanted = ((weeks * 7 + days) * 24 + hours) * 3600 + minutes * 60 + Fraction(seconds)
    span = Fraction(delay_of(text) // timedelta(microseconds=1), 10**6)
    assert 0 <= span - wanted < Fraction(1, 10**6)


@given(st.floats(max_value=0, exclude_max=True) | st.decimals(max_value=0, allow_nan=False).filter(bool).map(str))
def test_a_delay_below_zero_is_refused_however_small(seconds):
    with pytest.raises(InvalidMessage):
        delay_of(seconds)


def test_due_time_beyond_the_calendar_is_refused():
    with pytest.raises(InvalidMessage, match="9999"):
        due_after(DUE, timedelta(days=3_000_000))


@pytest.mark.parametrize(
    "text",
    [
        "2026-03-01T12:00:00Z",
        "2026-03-01T13:00:00+01:00",
        " 2026-03-01 12:00:00+00:00",
        "2026-03-01T12:00:00.0Z",
        "2026-03-01T12:00:00,0000Z",
        "2026-03-01t12:00z",
        "2026-03-01T12Z",
        "2026-03-01 14:00+02",
        "2026-03-01T14:30:00+0230",
        "20260301T120000Z",
        "20260301T070000.000-0500",
    ],
)
def test_moment_is_read_from_text(text):
    assert parse_moment("due_at", text) == DUE


@pytest.mark.parametrize(
    "text",
    [
        *("2026-03-01", "20260301", "2026-W09-7T12:00:00Z", "2026-060T12:00:00Z", "12:00:00Z", "2026-03-01T"),
        *("2026-03-01_12:00:00Z", "2026-03-01  12:00:00Z", "2026-3-1T12:00:00Z", "26-03-01T12:00:00Z", "2026-0301T12Z"),
        *("2026-02-29T12:00:00Z", "2026-03-01T24:00:00Z", "2026-03-01T12:60:00Z", "2026-03-01T12:00:60Z"),
        *("2026-03-01T12:00:00+24:00", "2026-03-01T12:00:00+01:60", "2026-03-01T12:00:00 UTC", "2026-03-01T12:00:00."),
        *("0000-03-01T12:00:00Z", "\u0662026-03-01T12:00:00Z", "1772366400", "tomorrow", ""),
    ],
)
def test_a_text_that_is_no_date_and_time_is_named_on_every_python(text):
    with pytest.raises(InvalidMessage, match=r"due_at: .* is not a time; write it as 2026-01-31T09:30:00\+01:00"):
        parse_time("due_at", text)


@given(AWARE, st.text("0123456789", min_size=1, max_size=15), st.sampled_from(".,"), st.sampled_from(["Z", "+00:00"]))
def test_a_fraction_of_a_microsecond_is_rounded_up(moment, digits, point, offset):
    """.NET writes seven digits; no message may be early."""
    text = f"{moment:%Y-%m-%dT%H:%M:%S}".rjust(19, "0") + f"{point}{moment.microsecond:06}{digits}{offset}"
    expected = moment + timedelta(microseconds=1 if int(digits) else 0)
    assert parse_moment("due_at", text) == expected


@given(AWARE.filter(lambda moment: moment.year > 1970), st.integers(1, 10**6 - 1), st.sampled_from("+-"))
def test_a_fraction_of_a_microsecond_in_an_offset_is_never_early(moment, digits, sign):
    text = f"{moment:%Y-%m-%dT%H:%M:%S}{sign}00:00:00.000000{digits:06}"
    found = parse_moment("due_at", text)
    exact = -Fraction(digits, 10**6) if sign == "+" else Fraction(digits, 10**6)
    assert 0 <= microseconds(found) - microseconds(moment.replace(microsecond=0)) - exact < 2


def test_a_naive_fraction_of_a_microsecond_is_rounded_up_too():
    assert parse_time("due_at", "2026-03-01T12:00:00.0000001") == datetime(2026, 3, 1, 12, 0, 0, 1)


@pytest.mark.parametrize("offset", ["", "Z"])
def test_a_fraction_at_the_end_of_the_calendar_is_refused(offset):
    last = "9999-12-31T23:59:59.999999"
    assert parse_time("due_at", f"{last}000{offset}").replace(tzinfo=None) == datetime.max
    for digits in ("1", "0000001"):
        with pytest.raises(InvalidMessage, match=r"due_at: .* ends after the year 9999"):
            parse_time("due_at", last + digits + offset)


class Finer(datetime):
    """A time with nanoseconds, as pandas has it."""

    nanosecond = 1


def test_a_nanosecond_at_the_end_of_the_calendar_is_refused():
    last = Finer(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)
    with pytest.raises(InvalidMessage, match=r"due_at: .* ends after the year 9999"):
        parse_moment("due_at", last)
    assert parse_moment("due_at", Finer(2026, 3, 1, 12, tzinfo=UTC)) == DUE + timedelta(microseconds=1)


def test_an_error_shows_a_long_text_in_part():
    with pytest.raises(InvalidMessage) as caught:
        parse_time("due_at", "x" * 10_000)
    assert len(str(caught.value)) < 300


def test_moment_without_offset_is_refused_and_the_error_says_what_to_do():
    with pytest.raises(NaiveTime, match=r"due_at: .* has no time zone; .*timezone="):
        parse_moment("due_at", "2026-03-01T12:00:00")
