"""The requests of the API: filters, ids, and changes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints, model_validator

from airflow_delayed.identity import SentBy
from airflow_delayed.store.api import check_token
from airflow_delayed.store.policy import MAX_DESTINATION, MAX_TAG
from airflow_delayed.store.records import place_of
from airflow_delayed.store.schema import MAX_ERROR, MAX_ID
from airflow_delayed.ui.models import LeftName, StateName

#: Messages that one change names.
MAX_IDS = 1000
#: Airflow's own limit of these names.
MAX_NAME = 250

#: Text without null characters, which no database stores and a driver would refuse.
_Text = Annotated[str, StringConstraints(min_length=1, pattern=r"^[^\x00]*$")]
MessageId = Annotated[_Text, StringConstraints(max_length=MAX_ID)]
_Name = Annotated[_Text, StringConstraints(max_length=MAX_NAME)]


def _token(value: str) -> str:
    place_of(value)
    return value


#: The place where a list goes on.
_After = Annotated[str, StringConstraints(max_length=2000), AfterValidator(_token)]


def _change_token(value: str) -> str:
    check_token(value)
    return value


#: The place where a change goes on.
_From = Annotated[str, StringConstraints(max_length=2000), AfterValidator(_change_token)]


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
        criteria = self.model_dump(exclude_none=True, include={*FilterBody.model_fields})
        sender = {name: criteria.pop(name) for name in _SENDER if name in criteria}
        return {**criteria, "sent_by": SentBy(**sender)} if sender else criteria


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
    after: _From | None = Field(default=None, description="Of a filter: the last answer's next")
    because: str | None = Field(default=None, max_length=1000, description="The reason, for the audit")

    @model_validator(mode="after")
    def _one_of(self) -> ChangeBody:
        _check_not_null(self, ["ids"])
        if (self.ids is None) == (self.filter is None):
            raise ValueError("give ids or filter, and not both")
        if self.filter is not None:
            _check_criteria(self.filter)
        return self


class EraseBody(ChangeBody):
    """A change that reaches cancelled messages too."""

    filter: CancelledFilterBody | None = None


class RestoreBody(EraseBody):
    """A change that takes cancels back."""

    overdue_ok: bool = Field(
        default=False, description="Also messages whose due time has passed; they are dispatched at once"
    )


def _check_criteria(criteria: FilterBody) -> None:
    if not criteria.model_dump(exclude_none=True):
        raise ValueError("filter: give at least one criterion")


class RescheduleBody(ChangeBody):
    """A change of due times: to a time, or to a delay from now, not both."""

    due_at: AwareDatetime | None = Field(
        default=None, description="With a zone; a time in the past is dispatched at once"
    )
    delay_seconds: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="From now on. When asking again with after=, give the first answer's due_at",
    )

    @model_validator(mode="after")
    def _when(self) -> RescheduleBody:
        if (self.due_at is None) == (self.delay_seconds is None):
            raise ValueError("give due_at or delay_seconds, and not both")
        return self


class JobBody(BaseModel):
    """A change by filter as a job; a reschedule has ``due_at`` or ``delay_seconds``."""

    model_config = ConfigDict(extra="forbid")

    action: Literal["cancel", "restore", "reschedule", "retry", "erase"]
    filter: CancelledFilterBody
    most: int | None = Field(
        default=None, ge=1, description="Look at no more than so many, such as a dry run has counted"
    )
    due_at: AwareDatetime | None = None
    delay_seconds: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    overdue_ok: bool = Field(default=False, description="Of a restore: also messages whose due time has passed")
    because: str | None = Field(default=None, max_length=1000, description="The reason, for the audit")

    @model_validator(mode="after")
    def _as_its_change(self) -> JobBody:
        _check_criteria(self.filter)
        times = 2 - (self.due_at, self.delay_seconds).count(None)
        if times != (self.action == "reschedule"):
            raise ValueError("give due_at or delay_seconds to a reschedule, not both, and to nothing else")
        if self.overdue_ok and self.action != "restore":
            raise ValueError("overdue_ok is for a restore")
        if self.filter.state == ["cancelled"] and self.action not in ("restore", "erase"):
            raise ValueError("state: cancelled messages can be restored or erased, and nothing else")
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
