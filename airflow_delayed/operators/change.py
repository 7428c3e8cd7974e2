"""Operators that change the messages of a store: cancel, reschedule, or retry failed ones.

Messages are selected by their ids or by a filter: :class:`SelectsMessages`.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import fields
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from airflow.sdk import BaseOperator

from airflow_delayed.compat import AirflowException, AirflowFailException, KeepsTexts
from airflow_delayed.criteria import UNSET, Unset, one_of, passed
from airflow_delayed.errors import InputError, UnsupportedConnection, check_choice, some
from airflow_delayed.identity import SentBy
from airflow_delayed.links import DeliveriesLink
from airflow_delayed.message import delay_of, due_after, parse_moment
from airflow_delayed.operators.task_state import first_change
from airflow_delayed.sources.templated import rendered_flag, rendered_text

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_delayed.hooks.store import DelayedStoreHook
    from airflow_delayed.store.api import Outcomes

_TIMES = ("due_from", "due_until")
#: What selects messages, but for ``ids``; the words are those of the hook's methods.
CRITERIA = ("tag", "destination", "deliver_conn_id", *_TIMES, "sent_by")


def rendered_reason(because: object) -> str | None:
    """Return the reason of a change as its template was rendered; None if that is nothing."""
    text = str(because).strip()
    return None if text in ("", "None") else text


class SelectsMessages(KeepsTexts):
    """A base beside Airflow's own, for the parameters ``ids`` and :data:`CRITERIA`, each of which may be a template."""

    #: Which of them were passed; as rendered, or from a mapped task's row, they may be None.
    selected: list[str]

    def select(self, **parameters: object) -> None:
        """Keep the parameters as attributes."""
        self.selected = [name for name, value in parameters.items() if value is not UNSET]
        for name, value in parameters.items():
            setattr(self, name, None if value is UNSET else value)
        if "ids" in self.selected and len(self.selected) > 1:
            raise ValueError("give ids= or a filter, and not both")

    def selection(self) -> dict[str, Any]:
        """Return ``ids``, or the criteria of the filter, as a store's methods take them."""
        checked: dict[str, Any] = {}
        for name, value in passed(**{name: getattr(self, name) for name in self.selected}).items():
            if name == "ids":
                checked[name] = message_ids(value)
            elif name == "sent_by":
                checked[name] = sent_by(value)
            else:
                checked[name] = (parse_moment if name in _TIMES else rendered_text)(name, value)
        return checked


def message_ids(value: Any) -> list[str]:
    """Return ids as a list: of a list, one id, or the result of a DelayedSendOperator; or of a list of such results."""
    if isinstance(value, Mapping):
        if value.get("message_ids") is None:
            raise InputError(
                "ids= is a dictionary without message_ids; a DelayedSendOperator of over 100 messages does not name"
                " them. Pass sent_by= or tag= instead"
            )
        value = value["message_ids"]
    if isinstance(value, str):
        if not value.strip() or value.startswith("["):
            raise InputError(
                f"ids={value!r} is a text, and no id; pass a list, or the other task's output itself instead of a"
                " template"
            )
        value = [value]
    if not isinstance(value, Iterable):
        raise InputError(f"ids= is a {type(value).__name__}, and must be a list of ids")
    ids: list[str] = []
    for one in value:
        if isinstance(one, Mapping):
            # of a mapped send
            ids += message_ids(one)
        elif isinstance(one, str) and one:
            ids.append(one)
        else:
            raise InputError(f"ids= has a {type(one).__name__}, or an empty text, among them; each id is a text")
    # an id that is passed twice is one message
    return list(dict.fromkeys(ids))


def sent_by(value: SentBy | Mapping[str, Any]) -> SentBy:
    """Return the tasks whose messages are selected."""
    if isinstance(value, SentBy):
        return value
    known = [field.name for field in fields(SentBy)]
    if not isinstance(value, Mapping) or "dag_id" not in value or set(value) - set(known):
        raise InputError(f"sent_by= must be a dictionary with dag_id, and may have {', '.join(known[1:])}")
    criteria: dict[str, Any] = {}
    for name in value:
        if value[name] is None:
            raise InputError(f"sent_by= has None as its {name}; leave it out to select all")
        criteria[name] = rendered_text(f"sent_by {name}", value[name])
    if "map_index" in criteria:
        try:
            criteria["map_index"] = int(criteria["map_index"])
        except ValueError:
            raise InputError(f"sent_by= has {criteria['map_index']!r} as its map_index, which is no number") from None
    return SentBy(**criteria)


#: How many ids of each outcome the result names.
IDS_OF_OUTCOME = 100


class ChangeOperator(SelectsMessages, BaseOperator):
    """The base of operators that change the messages of a store: by ids, or by a filter of at least one criterion.

    Messages that a broker has been given cannot be changed: see ``store_conn_id`` of DelayedSendOperator. Dispatchers
    may be at work meanwhile. A retry is safe: a message that was changed is not changed twice.

    A criterion that is passed and is None fails the task, because the filter would match more messages, and nothing is
    changed: a template that renders to nothing, another task that returns nothing, or a null in a mapped task's row.

    Returns ``changed``, the number of messages; ``outcomes``, the number of messages by outcome, such as
    ``{"cancelled": 3, "dispatched": 1}``; ``ids``, the first 100 ids of each outcome; and ``dry_run`` if it was one. An
    outcome is one of :class:`airflow_delayed.store.api.Outcome`. Where messages of the selection were dispatched to a
    broker and are not due yet, a cancel and a reschedule warn, and return ``out_of_reach``: for each connection
    ``messages`` and ``until``, the last due time.

    What to change:

    :param ids: the ids of messages: a list or one id, or what a DelayedSendOperator of up to 100 messages returned, or
        a list of such results, as a mapped send's output is. No messages are changed by an empty list.
    :param tag: only messages with this tag.
    :param destination: only messages to this queue.
    :param deliver_conn_id: only messages that this connection delivers; the store's own for its queue tables.
    :param due_from: only messages that are due then or later: an aware time, or ISO 8601 text with an offset.
    :param due_until: only messages that are due before then.
    :param sent_by: only messages that these tasks stored: a SentBy, or a dictionary with ``dag_id`` and, if wanted,
        ``run_id``, ``task_id`` and ``map_index``.

    The store:

    :param store_conn_id: the store, a SQL connection.
    :param table: the store's table.
    :param schema: the table's schema; by default the connection's own.

    Safety:

    :param on_missing: what to do if no message matches the filter, or if messages are not there or came too late:
        "warn", "fail" when all others are changed, or "ignore".
    :param dry_run: change nothing, and return what would happen; may be a template. Among the rendered templates it is
        ``only_plan``, because each operator of Airflow has a method ``dry_run``.
    :param because: the reason, for the audit beside the task; may be a template; cut to 1000 characters.

    Result:

    :raises ValueError: neither ids nor a criterion is given, or both; or another parameter cannot be.
    """

    template_fields: Sequence[str] = ("store_conn_id", "ids", *CRITERIA, "only_plan", "because", "table", "schema")
    template_fields_renderers: ClassVar[dict[str, str]] = {"ids": "json", "sent_by": "json"}
    operator_extra_links = (DeliveriesLink(),)
    ui_color = "#e8f1fb"
    #: The outcomes of messages that are as they should be, by the values of Outcome.
    reached: ClassVar[Collection[str]] = ()

    def __init__(
        self,
        *,
        store_conn_id: str,
        ids: Any = UNSET,
        tag: str | Unset = UNSET,
        destination: str | Unset = UNSET,
        deliver_conn_id: str | Unset = UNSET,
        due_from: datetime | str | Unset = UNSET,
        due_until: datetime | str | Unset = UNSET,
        sent_by: SentBy | Mapping[str, Any] | Unset = UNSET,
        on_missing: Literal["warn", "fail", "ignore"] = "warn",
        dry_run: bool | str = False,
        because: str | None = None,
        table: str = "delayed_messages",
        schema: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_choice("on_missing", on_missing, ("warn", "fail", "ignore"))
        self.store_conn_id = store_conn_id
        self.select(
            ids=ids,
            tag=tag,
            destination=destination,
            deliver_conn_id=deliver_conn_id,
            due_from=due_from,
            due_until=due_until,
            sent_by=sent_by,
        )
        if not self.selected:
            raise ValueError(f"give ids= or a filter: at least one of {', '.join(f'{name}=' for name in CRITERIA)}")
        self.on_missing = on_missing
        # BaseOperator has a method of the parameter's name
        self.only_plan = dry_run
        self.because = because
        self.table = table
        self.schema = schema

    def execute(self, context: Context) -> dict[str, Any]:
        """Change the messages, and return the counts.

        :raises AirflowFailException: a parameter, as it was rendered, cannot be; nothing was changed. Or with
            ``on_missing="fail"``, messages are not there or came too late.
        :raises AirflowException: with ``on_missing="fail"``, a dispatcher was delivering messages; a retry looks again.
        :raises TransportUnavailable: the database cannot be reached.
        """
        from airflow_delayed.hooks.store import DelayedStoreHook

        try:
            selection = self.selection()
            options: dict[str, Any] = {
                "dry_run": rendered_flag("dry_run", self.only_plan),
                "because": rendered_reason(self.because),
            }
            with closing(DelayedStoreHook(self.store_conn_id, table=self.table, schema=self.schema)) as store:
                options.update(self.prepare_change(store, context))
                found = self.change(store, **options, **selection)
        except (InputError, UnsupportedConnection, ValueError) as error:
            raise AirflowFailException(str(error)) from error
        text = f"{'would be' if options['dry_run'] else 'done'}: {found.in_words or 'no message'}"
        self.log.log(logging.WARNING if found.out_of_reach.messages else logging.INFO, "%s", text)
        result = self._result(found, options)
        self._report(result, by_ids="ids" in selection)
        return result

    def prepare_change(self, store: DelayedStoreHook, context: Context) -> dict[str, Any]:
        """Return further arguments of :meth:`change`; called once, before the first message is changed."""
        return {}

    @abstractmethod
    def change(self, store: DelayedStoreHook, **arguments: Any) -> Outcomes:
        """Change messages by ``ids=``, or by a filter."""

    def _result(self, found: Outcomes, options: Mapping[str, Any]) -> dict[str, Any]:
        named: dict[str, list[str]] = {}
        for message_id, outcome in found.items():
            if len(first := named.setdefault(outcome.value, [])) < IDS_OF_OUTCOME:
                first.append(message_id)
        outcomes = {outcome.value: count for outcome, count in found.counts.items()}
        result: dict[str, Any] = {"changed": found.changed, "outcomes": outcomes, "ids": named}
        if "due_at" in options:
            result["due_at"] = options["due_at"].isoformat()
        if rows := found.out_of_reach.rows():
            result["out_of_reach"] = [{**row, "until": row["until"].isoformat()} for row in rows]
        if options["dry_run"]:
            result["dry_run"] = True
        return result

    def _report(self, result: Mapping[str, Any], *, by_ids: bool) -> None:
        outcomes: Mapping[str, int] = result["outcomes"]
        missing = {name: count for name, count in outcomes.items() if name not in self.reached}
        if missing:
            cases = [f"{message_id}: {name}" for name in missing for message_id in result["ids"].get(name, ())]
            text = f"{_counts(missing)} of {sum(outcomes.values()):,} messages ({some(cases)})"
        elif outcomes or by_ids:
            return
        else:
            text = "no message matches"
        if self.on_missing == "warn":
            self.log.warning("%s", text)
        if self.on_missing != "fail" or result.get("dry_run"):
            return
        if "in flight" in missing:
            raise AirflowException(f"{text}. What is in flight, a dispatcher is delivering; a retry looks again")
        raise AirflowFailException(f"{text}. If that may be, pass on_missing='warn' or 'ignore'")


class DelayedCancelOperator(ChangeOperator):
    """Removes messages from a store, failed ones too; a late retry of their task does not store them again.

    The parameters and the result are those of :class:`ChangeOperator`.
    """

    reached = ("cancelled", "already cancelled", "already removed")

    def change(self, store: DelayedStoreHook, **arguments: Any) -> Outcomes:
        """Cancel messages."""
        return store.cancel(**arguments)


class DelayedRescheduleOperator(ChangeOperator):
    """Changes the due time of messages that wait in a store; failed messages stay as they are.

    The other parameters are those of :class:`ChangeOperator`; the result has the new ``due_at`` too.

    :param due_at: an aware time, or ISO 8601 text with an offset; a message with a past due time is dispatched at once.
    :param delay: instead of ``due_at``, a timedelta or seconds, counted from the task's first try, by the database's
        clock: a retry means the same due time. A task that is cleared counts from then on. Before Airflow 3.3, which
        keeps nothing from one try to the next, each try counts from its own start, and moves the messages again.
    """

    template_fields: Sequence[str] = (*ChangeOperator.template_fields, "due_at", "delay")
    reached = ("rescheduled", "unchanged")

    def __init__(
        self,
        *,
        due_at: datetime | str | None = None,
        delay: timedelta | float | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.due_at = due_at
        self.delay = delay
        one_of(due_at=self.due_at, delay=self.delay)

    def prepare_change(self, store: DelayedStoreHook, context: Context) -> dict[str, Any]:
        """Return the new due time."""
        one_of(due_at=self.due_at, delay=self.delay)
        if self.due_at is not None:
            return {"due_at": parse_moment("due_at", self.due_at)}
        assert self.delay is not None
        delay = delay_of(self.delay)
        return {"due_at": due_after(first_change(context, store.now()), delay)}

    def change(self, store: DelayedStoreHook, **arguments: Any) -> Outcomes:
        """Reschedule messages."""
        return store.reschedule(**arguments)


class DelayedRetryOperator(ChangeOperator):
    """Lets failed messages of a store wait again, as if they had never failed.

    Messages that are due are dispatched at once. Expired messages stay as they are. The parameters and the
    result are those of :class:`ChangeOperator`.
    """

    reached = ("retried", "unchanged")

    def change(self, store: DelayedStoreHook, **arguments: Any) -> Outcomes:
        """Retry messages."""
        return store.retry(**arguments)


def _counts(outcomes: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in outcomes.items())
