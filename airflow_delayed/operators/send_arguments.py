"""The parameters of a sending task, frozen and checked: the route, the rules and the source that follow from them.

The values of some are not shown by Airflow's view of rendered templates: :class:`HidesArguments`.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar, cast

from airflow.sdk import XComArg
from airflow.sdk.definitions.mappedoperator import MappedOperator

from airflow_delayed import config, lineage
from airflow_delayed.addresses import shown
from airflow_delayed.clock import resolve, zone
from airflow_delayed.compat import KeepsTexts
from airflow_delayed.delivery import DelayStore, delivery_for, store_for
from airflow_delayed.errors import InputError, InvalidMessage, SourceError, check_choice
from airflow_delayed.fields import FIELD_MOMENTS, FIELD_NAMES
from airflow_delayed.identity import Origin, scope_of
from airflow_delayed.intake.columns import ColumnRules, RowRules, check_renames
from airflow_delayed.intake.sources import ListSource, Rejects, Source
from airflow_delayed.intake.spool import Spool
from airflow_delayed.message import delay_of, due_after, parse_time, plain_span, utc
from airflow_delayed.operators.task_state import iteration_of, turn_of
from airflow_delayed.route import Route
from airflow_delayed.sending import Log
from airflow_delayed.sources.templated import TemplatedSource, file_system, open_files, path_text, rendered_text
from airflow_delayed.store.policy import check_on_conflict
from airflow_delayed.trace import current_trace

if TYPE_CHECKING:
    from airflow.sdk import Context
    from typing_extensions import Self

MASK = "***"


class MaskedHeaders(Mapping[str, str]):
    """An operator's headers: a mapping of text, a template, or the result of another task. They are rendered as usual.

    Airflow shows rendered templates to everybody who may see the task, as :meth:`serialize` returns them: names alone.
    """

    template_fields = ("content",)

    def __init__(self, content: Any) -> None:
        self.content = content

    def serialize(self) -> Any:
        """Return the names without the values."""
        if isinstance(self.content, Mapping):
            return {str(name): MASK for name in self.content}
        return MASK

    def __str__(self) -> str:
        return str(self.serialize())

    __repr__ = __str__

    def __getitem__(self, name: str) -> str:
        value: str = self.content[name]
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.content)

    def __len__(self) -> int:
        return len(self.content)


class HidesArguments(KeepsTexts):
    """A part of an operator whose headers may be :class:`MaskedHeaders`, and whose messages are no template fields."""

    headers: Any
    source: Any
    task_id: str

    def prepare_for_execution(self) -> Any:
        """Return Airflow's copy of the operator, whose headers and source are rendered by themselves."""
        made = super().prepare_for_execution()  # type: ignore[misc]
        made.headers = copy(made.headers)
        made.source = copy(made.source)
        return made

    def render_hidden(self, context: Context, name: str) -> Any:
        """Render an argument that is no template field, since the UI would show it.

        The result of another task is never rendered: a body is no template. In a mapped task that was expanded from
        an XCom, that result has taken the argument's place already.
        """
        value = getattr(self, name)
        dag = context.get("dag")
        declared = dag.get_task(self.task_id) if dag is not None else self
        if isinstance(declared, MappedOperator) and not _is_default(declared, name, value) and _is_xcom(declared, name):
            return value
        return self.render_template(value, context)


def _is_default(mapped: MappedOperator, name: str, value: object) -> bool:
    defaults = (getattr(owner, "default_args", None) or {} for owner in (mapped.dag, mapped.task_group))
    return name in mapped.partial_kwargs or any(value is default.get(name) for default in defaults)


def _is_xcom(mapped: MappedOperator, name: str) -> bool:
    expanded = mapped.expand_input.value
    if isinstance(expanded, Mapping):
        return isinstance(expanded.get(name), XComArg)
    if isinstance(expanded, XComArg):
        return True
    return any(isinstance(each, XComArg) or isinstance(each.get(name), XComArg) for each in expanded)


def masked(headers: Any) -> Any:
    """Return an operator's headers as its template field."""
    return headers if headers is None or isinstance(headers, MaskedHeaders) else MaskedHeaders(headers)


def headers_of(headers: Any) -> Any:
    """Return an operator's headers as they were rendered."""
    return headers.content if isinstance(headers, MaskedHeaders) else headers


@dataclass(frozen=True, kw_only=True, repr=False)
class CommonArguments:
    """The parameters that DelayedSendOperator and DelayedSparkSendOperator share; the former describes them."""

    #: Text parameters, whose template must not render to nothing.
    texts: ClassVar[tuple[str, ...]] = ("conn_id", "destination", "tag", "timezone")
    #: Text parameters that may be path objects.
    paths: ClassVar[tuple[str, ...]] = ()
    #: Parameters with few values.
    choices: ClassVar[Mapping[str, tuple[str | None, ...]]] = {
        "past_due": ("fail", "send", "skip"),
        "on_empty": ("warn", "fail", "skip"),
    }

    conn_id: str
    source: str | TemplatedSource | None
    destination: str | None
    delay: timedelta | float | str | None
    delay_from: datetime | str | None
    due_at: datetime | str | None
    headers: Any
    id_columns: Sequence[str] | str | None
    tag: str | None
    expires_at: datetime | str | None
    spread: timedelta | str | None
    store_conn_id: str | None
    hold_over: timedelta
    until_due: bool
    on_conflict: str
    timezone: str | None
    past_due: str
    max_past: timedelta
    on_empty: str
    columns: Mapping[str, str] | None
    envelope: str | None
    only_plan: bool

    def __post_init__(self) -> None:
        if self.delay is not None and self.due_at is not None:
            raise ValueError("delay= and due_at= say the same thing; give one of them")
        for name, choices in self.choices.items():
            check_choice(name, getattr(self, name), choices)
        check_renames(self.columns)
        for name in ("hold_over", "max_past", *(["spread"] if self.spread is not None else [])):
            object.__setattr__(self, name, span_of(name, getattr(self, name)))
        if self.until_due and self.store_conn_id is None:
            raise ValueError(
                "until_due=True needs a store, and store_conn_id= names none: only there can messages wait until they"
                " are due, and be cancelled until then. If the connection of conn_id= is a store itself, a SQL database"
                " with queue tables, name it as store_conn_id= too"
            )
        if self.until_due and self.hold_over:
            raise ValueError(
                "until_due=True lets all messages wait in the store, and hold_over= sends messages that are due soon at"
                " once; give one of them"
            )
        # a template is checked when it is rendered
        if "{{" not in str(self.on_conflict) and not isinstance(self.on_conflict, XComArg):
            check_on_conflict(self.on_conflict)

    def inputs(self) -> list[lineage.Dataset]:
        """Return the source by OpenLineage's name."""
        if isinstance(self.source, TemplatedSource):
            return self.source.inputs()
        return [] if self.source is None else [lineage.file(self.source)]

    @classmethod
    def of(cls, attributes: Mapping[str, Any]) -> Self:
        """Return the parameters among an operator's attributes, as a DAG's author wrote them."""
        return cls(**{field.name: attributes[field.name] for field in fields(cls)})

    @classmethod
    def rendered(cls, attributes: Mapping[str, Any]) -> Self:
        """Return the parameters among an operator's attributes, as their templates were rendered."""
        # another task may return a path object
        attributes = {**attributes, **{name: path_text(attributes[name]) for name in cls.paths}}
        columns = attributes["id_columns"]
        if isinstance(columns, list | tuple) and not columns:
            # another task may return none
            attributes = {**attributes, "id_columns": None}
        try:
            check_on_conflict(attributes["on_conflict"])
            arguments = cls.of(attributes)
        except ValueError as error:
            raise InputError(str(error)) from None
        # None, or a source that is an object
        others = [name for name in cls.texts if isinstance(attributes[name], TemplatedSource | None)]
        texts: dict[str, str | None] = {
            name: rendered_text(name, attributes[name]) for name in cls.texts if name not in others
        }
        for name in ("store_conn_id", "envelope"):
            # nothing stands for a parameter that was left out
            empty = str(attributes[name]).strip() in ("", "None")
            texts[name] = None if empty else rendered_text(name, attributes[name])
        changed: dict[str, Any] = {**texts, "headers": headers_of(arguments.headers)}
        try:
            return replace(arguments, **changed)
        except ValueError as error:
            # a store that rendered to nothing
            raise InputError(str(error)) from None

    def route(self, context: Context, closing: ExitStack, log: Log) -> Route:
        """Return the route: the transport that delivers, and the store in front of it."""
        options: dict[str, Any] = {"envelope": self.envelope} if self.envelope else {}
        if options and self.store_conn_id is not None:
            raise InputError(
                "envelope= cannot go with store_conn_id=, whose dispatcher delivers as the connection says; set the"
                f" extra of {self.conn_id!r} instead"
            )
        stored: dict[str, Any] = {"on_conflict": self.on_conflict} if self.on_conflict != "error" else {}
        if self.until_due:
            stored["until_due"] = True
        if self.store_conn_id in (None, self.conn_id):
            options |= stored
        delivery = delivery_for(self.conn_id, **options)
        closing.callback(delivery.close)
        store: DelayStore | None = None
        if delivery.is_store:
            if self.store_conn_id is not None and self.store_conn_id != self.conn_id:
                raise InputError(
                    f"conn_id={self.conn_id!r} is the connection that delivers, and stores its messages itself: leave"
                    f" store_conn_id={self.store_conn_id!r} out; or, where {self.conn_id!r} is only the store of"
                    " another transport, pass it as store_conn_id=, and that transport as conn_id="
                )
        elif self.store_conn_id is not None:
            store = store_for(self.store_conn_id, self.conn_id, **stored)
            closing.callback(store.close)
        route = Route.of(delivery, store, hold_over=self.hold_over, trace=current_trace())
        if route.store is not None:
            route.store.origin = origin_of(context)
        if store is not None and route.hold_over < self.hold_over:
            log.info("hold_over is %s here: more than that %s does not delay by itself", route.hold_over, self.conn_id)
        return route

    def anchor(self, context: Context) -> datetime | None:
        """Return the start of relative delays that ``delay_from=`` names: "run", or a time."""
        start = context["dag_run"].run_after if self.delay_from == "run" else self.delay_from
        return moment_of("delay_from", start, self.timezone)

    def header_texts(self) -> dict[str, str]:
        """Return the headers for all messages."""
        headers = {} if self.headers is None else self.headers
        if isinstance(headers, Mapping) and all(isinstance(text, str) for pair in headers.items() for text in pair):
            return dict(headers)
        raise InvalidMessage("headers", "must be a dictionary of text to text")

    def id_column_names(self) -> tuple[str, ...]:
        """Return the columns whose values name a message."""
        return (self.id_columns,) if isinstance(self.id_columns, str) else tuple(self.id_columns or ())


@dataclass(frozen=True, kw_only=True, repr=False)
class SendArguments(CommonArguments):
    """The parameters of DelayedSendOperator, see there."""

    texts: ClassVar[tuple[str, ...]] = (*CommonArguments.texts, "message_id", "source", "rejects")
    paths: ClassVar[tuple[str, ...]] = ("source", "rejects")
    choices: ClassVar[Mapping[str, tuple[str | None, ...]]] = {
        **CommonArguments.choices,
        "on_clear": ("same_ids", "new_ids"),
    }

    messages: Any
    value: Any
    message_id: str | None
    rejects: str | None
    on_clear: str

    def __post_init__(self) -> None:
        self._check_content()
        super().__post_init__()
        if self.new_ids and (self.message_id is not None or self.id_columns is not None):
            raise ValueError("on_clear='new_ids' has no power over ids that message_id= or id_columns= give")

    def _check_content(self) -> None:
        sources = [name for name in ("messages", "source", "value") if getattr(self, name) is not None]
        if len(sources) != 1:
            names = ", ".join(sources) or "none"
            raise ValueError(f"give one of messages=, source= and value=; given: {names}")
        if self.message_id is not None and (self.messages is not None or self.source is not None):
            raise ValueError("message_id= names one message; for many use id_columns=, or a column message_id")
        if self.id_columns is not None and not isinstance(self.id_columns, XComArg) and not self.id_columns:
            raise ValueError("id_columns= is empty; leave it out to have ids made from content")
        if self.id_columns is not None and self.messages is None and self.source is None:
            raise ValueError("id_columns= names columns of messages= or source=; for one message give message_id=")
        if self.columns and self.value is not None:
            raise ValueError("columns= names columns of messages= or source=, and value= has none; leave columns= out")
        if self.columns is not None and isinstance(self.source, TemplatedSource) and self.source.columns is not None:
            raise ValueError("columns= is given to the source and to the task; leave one of them out")

    @property
    def new_ids(self) -> bool:
        """Whether a cleared task is another send."""
        return self.on_clear == "new_ids"

    @property
    def way(self) -> bytes:
        """An identity of connections and options: on another way, no message has been sent."""
        names = ("conn_id", "store_conn_id", "on_conflict", "envelope")
        return scope_of(*(str(getattr(self, name)) for name in names))

    def rules(self, context: Context, anchor: datetime | None) -> tuple[ColumnRules, RowRules]:
        """Return the rules for the source's columns, and the values for rows without them.

        :param anchor: when relative delays begin; None: that is not known in this try.
        """
        if self.delay_from is not None:
            anchor = self.anchor(context)
        elif iteration_of(context) is not None and not self.new_ids:
            # an iteration that replaces a cleared one looks like a first try, and would count from the clear
            anchor = None
        columns = self.columns
        if isinstance(self.source, TemplatedSource) and self.source.columns is not None:
            columns = self.source.columns
        due_at = moment_of("due_at", self.due_at, self.timezone)
        if self.delay is not None:
            due_at = due_after(anchor, delay_of(self.delay))
        rules = RowRules(
            anchor=anchor,
            scope=scope_of(*origin_of(context).parts, *([turn_of(context)] if self.new_ids else [])),
            destination=self.destination,
            due_at=due_at,
            headers=self.header_texts(),
            message_id=self.message_id,
            id_columns=self.id_column_names(),
            optional=self._optional(),
            spread=cast(timedelta, self.spread or timedelta(0)),
            zone=None if self.timezone is None else zone(self.timezone),
            columns=columns,
        )
        wanted = ColumnRules(
            destination=self.destination is not None,
            due=due_at is not None,
            id_columns=self.id_column_names(),
            columns=columns,
        )
        return wanted, rules

    def _optional(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in FIELD_NAMES}
        return values | {name: moment_of(name, values[name], self.timezone) for name in FIELD_MOMENTS}

    def rows(self, content: Callable[[str], Any], spool: Spool) -> Source:
        """Return the rows of ``source``, ``messages`` or ``value``."""
        naive_ok = self.timezone is not None
        if isinstance(self.source, TemplatedSource):
            return self.source.open(spool, naive_ok=naive_ok)
        if self.source is not None:
            return open_files(self.source, naive_ok=naive_ok)
        if self.messages is not None:
            messages = content("messages")
            if isinstance(messages, str | bytes | Mapping) or not hasattr(messages, "__iter__"):
                raise SourceError(
                    f"messages= must be a list of messages, not {type(messages).__name__}; if another task returns it,"
                    " has that run before? In .partial() an XComArg makes no dependency"
                )
            return ListSource(list(messages))
        return ListSource([{"value": content("value")}], "parameters")

    def rejects_file(self, context: Context) -> Rejects:
        """Return the file of ``rejects``; a map index and the iteration of a task loop come before its ending."""
        assert self.rejects is not None
        fs, path = file_system(self.rejects)
        folder = self.source.folder if isinstance(self.source, TemplatedSource) else self.source
        if folder is not None:
            source = file_system(folder)[1].rstrip("/")
            if path == source or path.startswith(source + "/"):
                raise InputError(f"rejects={shown(self.rejects)} lies in the source itself; give it a place of its own")
        origin = origin_of(context)
        marks = [f"-{origin.map_index}"] if origin.map_index >= 0 else []
        if origin.iteration is not None:
            marks.append(f"-iteration-{origin.iteration}")
        stem, ending = posixpath.splitext(path)
        path = stem + "".join(marks) + ending
        return Rejects(fs, path, f"{origin.dag_id}.{origin.run_id}.{origin.task_id}")


def hold_over_of(hold_over: timedelta | str | None, *, until_due: bool) -> timedelta | str:
    """Return how long before its due time a message goes to the transport at once, by default as configured."""
    if hold_over is not None:
        return hold_over
    return timedelta(0) if until_due else config.hold_over()


def span_of(name: str, span: object) -> timedelta:
    """Return a parameter that is a span of time: a timedelta or an ISO 8601 duration. A number would have no unit.

    :raises ValueError: it is neither, or negative.
    """
    if isinstance(span, timedelta) and span >= timedelta(0):
        return plain_span(name, span)
    if isinstance(span, str) and span.strip()[:1] == "P":
        try:
            return delay_of(span, name)
        except InvalidMessage as error:
            raise ValueError(str(error)) from None
    raise ValueError(f"{name}={span!r} must be a timedelta or an ISO 8601 duration such as 'PT10M', and not negative")


def origin_of(context: Context) -> Origin:
    """Return the run of the task: its messages are looked up by it, and it is part of their ids.

    An unmapped task has the map index -1 in every iteration of a task loop.
    """
    ti = context["ti"]
    map_index = -1 if ti.map_index is None else ti.map_index
    return Origin(
        dag_id=ti.dag_id,
        run_id=ti.run_id,
        task_id=ti.task_id,
        map_index=map_index,
        iteration=iteration_of(context),
    )


def moment_of(column: str, value: datetime | str | None, timezone: str | None) -> datetime | None:
    """Return a parameter that is a time."""
    if value is None:
        return None
    parsed = parse_time(column, value)
    if timezone is not None and parsed.utcoffset() is None:
        return resolve(column, parsed, zone(timezone))[0]
    return utc(column, parsed)
