"""What the API is asked: filters, ids, and changes."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from airflow_delayed.store.schema import MAX_CONN_ID, MAX_DESTINATION, MAX_ID, MAX_TAG
from airflow_delayed.ui.models import State

#: Messages that one change names.
MAX_IDS = 1000
#: Airflow's own limit of these names.
MAX_NAME = 250

MessageId = Annotated[str, Field(min_length=1, max_length=MAX_ID)]


class Filter(BaseModel):
    """Which messages are meant; texts are compared byte by byte, times have a zone."""

    model_config = ConfigDict(extra="forbid")

    tag: str | None = Field(default=None, max_length=MAX_TAG)
    destination: str | None = Field(default=None, max_length=MAX_DESTINATION)
    deliver_conn_id: str | None = Field(
        default=None, max_length=MAX_CONN_ID, description="The store's own: its queue tables"
    )
    due_from: datetime | None = Field(default=None, description="Due then or later")
    due_until: datetime | None = Field(default=None, description="Due before then")
    state: list[State] | None = Field(default=None, min_length=1)
    dag_id: str | None = Field(default=None, max_length=MAX_NAME)
    run_id: str | None = Field(default=None, max_length=MAX_NAME)
    task_id: str | None = Field(default=None, max_length=MAX_NAME)
    map_index: int | None = Field(default=None, ge=-1)


class Listing(Filter):
    """The query of a list."""

    id: list[MessageId] | None = Field(default=None, max_length=MAX_IDS)
    after: str | None = Field(default=None, max_length=2000)
    limit: int = Field(default=50, ge=1, le=200)


class Change(BaseModel):
    """Messages by ids or by a filter, one of them; a filter has at least one criterion."""

    model_config = ConfigDict(extra="forbid")

    ids: list[MessageId] | None = Field(default=None, min_length=1, max_length=MAX_IDS)
    filter: Filter | None = None
    dry_run: bool = Field(description="Change nothing, and tell what would happen")
    after: str | None = Field(default=None, max_length=2000, description="Of a filter: the last answer's next")

    @model_validator(mode="after")
    def _one_of(self) -> Change:
        if (self.ids is None) == (self.filter is None):
            raise ValueError("give ids or filter, and not both")
        if self.filter is not None and not self.filter.model_dump(exclude_none=True):
            raise ValueError("filter: give at least one criterion; nothing is meant by all there is")
        return self


class Rescheduling(Change):
    """A change with the new due time, one of two."""

    due_at: datetime | None = Field(default=None, description="With a zone; what is past is handed over at once")
    delay_seconds: float | None = Field(
        default=None, ge=0, description="From now on. When asking again with after=, give the first answer's due_at"
    )

    @model_validator(mode="after")
    def _when(self) -> Rescheduling:
        if (self.due_at is None) == (self.delay_seconds is None):
            raise ValueError("give due_at or delay_seconds, and not both")
        return self


class Redrive(BaseModel):
    """Moving back what could not be delivered."""

    model_config = ConfigDict(extra="forbid")

    dry_run: bool = Field(description="Move nothing, and tell how many there are")
