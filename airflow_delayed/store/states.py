"""How a message stands: waiting, due, in flight, retrying, failed or expired."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import Enum
from typing import Any

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    ScalarSelect,
    and_,
    bindparam,
    exists,
    false,
    func,
    not_,
    or_,
    select,
)

from airflow_delayed.message import UTC
from airflow_delayed.store.schema import Tables, UtcTime

#: A dispatcher hands nothing over that is due later than this, so all that is not simply waiting is due before.
AHEAD = timedelta(days=1)
#: A time for a statement that is made once and run with the times of each who asks.
EXAMPLE = datetime(2000, 1, 1, tzinfo=UTC)
#: A lease is not renewed for longer.
LONGEST_LEASE = timedelta(hours=1)


class MessageState(str, Enum):
    """How a message stands, by the database's clock."""

    #: Not yet due.
    WAITING = "waiting"
    #: Due, and nobody has taken it yet.
    DUE = "due"
    #: A dispatcher is handing it over.
    IN_FLIGHT = "in flight"
    #: Handing it over failed; it is tried again later.
    RETRYING = "retrying"
    #: Not tried any more.
    FAILED = "failed"
    #: Its ``expires_at`` has passed; it is not handed over.
    EXPIRED = "expired"


def given_up(reason: str) -> MessageState:
    """Return how a message of the table of failed ones stands, by its column Reason."""
    return MessageState.EXPIRED if reason == MessageState.EXPIRED.value else MessageState.FAILED


def state_of(row: Mapping[str, Any], now: datetime) -> MessageState:
    """Return how a message of the table of messages stands.

    :param row: has Time, ExpiresAt, NextTry, and ClaimedUntil of its lease or None.
    """
    if row["ClaimedUntil"] is not None and row["ClaimedUntil"] > now:
        return MessageState.IN_FLIGHT
    if row["ExpiresAt"] is not None and row["ExpiresAt"] <= now:
        return MessageState.EXPIRED
    if row["NextTry"] is not None and row["NextTry"] > now:
        return MessageState.RETRYING
    return MessageState.DUE if row["Time"] <= now else MessageState.WAITING


def moments(now: datetime) -> dict[str, datetime]:
    """Return the times that :func:`in_state` compares with, by the names of its parameters."""
    return {"now": now, "soon": now + AHEAD, "lately": now - LONGEST_LEASE}


def moment(name: str, now: datetime) -> BindParameter[datetime]:
    """Return one of :func:`moments` as a parameter of this name."""
    return bindparam(name, moments(now)[name], UtcTime())


def claimed_until(tables: Tables) -> ScalarSelect[datetime]:
    """Return the SQL for until when a message is held.

    As a query of one value, and not as a join: no database may think of reading all that is remembered.
    """
    lease = tables.past.alias("lease")
    return (
        select(lease.c.ClaimedUntil).where(lease.c.Id == tables.messages.c.Id).correlate(tables.messages)
    ).scalar_subquery()


def in_state(tables: Tables, state: MessageState, at: datetime) -> ColumnElement[bool]:
    """Return the condition for rows of the table of messages that stand so: the same as :func:`state_of`, in SQL."""
    table, lease = tables.messages, tables.past.alias("lease")
    now, soon, lately = (moment(name, at) for name in ("now", "soon", "lately"))
    if state is MessageState.IN_FLIGHT:
        # by the index on At the few that are leased are found first
        return exists().where(lease.c.Id == table.c.Id, lease.c.At > lately, lease.c.ClaimedUntil > now)
    held = func.coalesce(claimed_until(tables), now, type_=UtcTime()) > now
    expired = and_(table.c.ExpiresAt.is_not(None), table.c.ExpiresAt <= now)
    if state is MessageState.EXPIRED:
        # no message expires before it is due, so the index on Time serves
        return and_(table.c.Time <= now, expired, not_(held))
    retrying = and_(table.c.NextTry.is_not(None), table.c.NextTry > now)
    alive = and_(or_(table.c.ExpiresAt.is_(None), table.c.ExpiresAt > now), not_(held))
    if state is MessageState.RETRYING:
        # which lets the index on Time be used
        return and_(table.c.Time <= soon, retrying, alive)
    tried = or_(table.c.NextTry.is_(None), table.c.NextTry <= now)
    if state is MessageState.DUE:
        return and_(table.c.Time <= now, tried, alive)
    if state is MessageState.WAITING:
        return and_(table.c.Time > now, tried, alive)
    return false()  # FAILED is another table
