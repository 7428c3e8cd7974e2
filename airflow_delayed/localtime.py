"""Local times without an offset, and what they mean in a named time zone."""

from __future__ import annotations

from datetime import datetime
from enum import Enum
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from airflow_delayed.errors import InputError, InvalidMessage
from airflow_delayed.message import UTC


class Shift(Enum):
    """What daylight saving did to a local time."""

    NONE = "none"
    GAP = "gap"
    FOLD = "fold"


def zone(name: str) -> ZoneInfo:
    """Return a time zone by its IANA name.

    :raises InputError: there is none of that name.
    """
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise InputError(f"timezone={name!r} is not an IANA time zone; write it as 'Europe/Berlin' or 'UTC'") from None


def resolve(column: str, local: datetime, where: ZoneInfo) -> tuple[datetime, Shift]:
    """Return the UTC time of a naive local time.

    A time that a gap skips moves later by the gap's length; of a time that happens twice the first is taken.

    :raises InvalidMessage: it lies outside the years 1 to 9999 in UTC.
    """
    first = local.replace(tzinfo=where, fold=0)
    try:
        moment = first.astimezone(UTC)
    except OverflowError:
        raise InvalidMessage(column, f"{local} lies outside the years 1 to 9999 in UTC") from None
    if first.utcoffset() == local.replace(tzinfo=where, fold=1).utcoffset():
        return moment, Shift.NONE
    happened = moment.astimezone(where).replace(tzinfo=None, fold=0) == local.replace(fold=0)
    return moment, Shift.FOLD if happened else Shift.GAP
