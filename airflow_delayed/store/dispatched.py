"""The message that was handed over last."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Engine, exists, not_, select

from airflow_delayed.store.leases import HANDED_OVER
from airflow_delayed.store.schema import Tables

#: So many ids are looked at, from the newest on; what was changed or is in flight is passed over.
LOOKED_AT = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatched:
    """A message that was handed over, and whose id is remembered."""

    message_id: str
    #: When it was taken to be handed over, by the database's clock.
    at: datetime
    destination: str | None
    dispatcher: str | None


def last(engine: Engine, tables: Tables) -> Dispatched | None:
    """Return the message that was handed over last; None: none is remembered, or much else happened since."""
    past, messages = tables.past, tables.messages
    newest = (
        select(past.c.Id, past.c.At, past.c.Destination, past.c.Dispatcher, past.c.Outcome)
        .order_by(past.c.At.desc())
        .limit(LOOKED_AT)
        .subquery()
    )
    in_flight = exists().where(messages.c.Id == newest.c.Id)
    statement = (
        select(newest).where(newest.c.Outcome == HANDED_OVER, not_(in_flight)).order_by(newest.c.At.desc()).limit(1)
    )
    with engine.connect().execution_options(read_only=True) as connection:
        row = connection.execute(statement).one_or_none()
    if row is None:
        return None
    return Dispatched(message_id=row.Id, at=row.At, destination=row.Destination, dispatcher=row.Dispatcher)
