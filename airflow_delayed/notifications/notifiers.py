"""DelayedNotifier and DelayedCancelNotifier: a message that is due some time after a failure, unless it is taken back.

Airflow calls a DAG's callbacks in the DAG processor, a task's on the worker, a DeadlineAlert's in the triggerer (async)
or by the executor (sync). None of these fails a task, so an error is logged and raised.
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast, get_args

from airflow.sdk import BaseNotifier

from airflow_delayed import delivery
from airflow_delayed.compat import KeepsTexts, conf
from airflow_delayed.errors import InputError, InvalidMessage, LimitExceeded, check_choice, explained
from airflow_delayed.identity import key_id
from airflow_delayed.intake.rows import body_of
from airflow_delayed.message import DelayedMessage, check_headers, check_text, delay_of, due_after
from airflow_delayed.notifications.callback_run import CallbackRun, Per, ids_of
from airflow_delayed.notifications.store_calls import calls_of
from airflow_delayed.store.policy import MAX_DESTINATION, MAX_QUEUE_NAME

if TYPE_CHECKING:
    import jinja2
    from airflow.sdk import DAG, Context

    from airflow_delayed.hooks.store import DelayedStoreHook
    from airflow_delayed.store.api import ArmOutcome, Escalation, RunAttempt, RunFailure, TakenBack

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RenderedFields:
    """The template fields of a notifier for one run.

    :param problems: of the fields that could not be rendered, and are None.
    """

    values: Mapping[str, Any]
    problems: list[str] = field(default_factory=list)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


class StoreNotifier(KeepsTexts, BaseNotifier, ABC):
    """The base of the notifiers: work in a store, by a thread that is waited for at most 10 seconds.

    One notifier may be called for several runs at once: its fields stay as the DAG's author wrote them.

    :param store_conn_id: the SQL connection of the store.
    :param per: "run", "dag" or "task".
    :param key: narrows the runs that belong together; rendered.
    :param context: Airflow's, when it makes the notifier for a DeadlineAlert.
    """

    template_fields: Sequence[str] = ("store_conn_id", "key")
    #: The fields without which the work is done all the same.
    optional_fields: Sequence[str] = ("key",)
    #: The arguments that are kept for the listener; no body, and no header.
    kept_arguments: Sequence[str] = ("store_conn_id", "per", "key")
    #: Whether it stores a message, of which a callback knows more than the listener.
    stores: bool = False

    def __init__(self, *, store_conn_id: str | None, per: Per, key: str | None, context: Context | None) -> None:
        super().__init__(context)
        if store_conn_id is None:
            raise ValueError(
                f"{type(self).__name__} needs store_conn_id=, a SQL connection: a transport would take the message at"
                " once, and nobody could take it back. Install the store's tables there (TopologyInstallOperator), and"
                " let a StoreDispatchOperator run"
            )
        check_choice("per", per, get_args(Per))
        if key is not None and (not isinstance(key, str) or not key):
            raise ValueError(f"key={key!r} must be text that is not empty, such as '{{{{ params.customer }}}}'")
        self.store_conn_id = store_conn_id
        self.per = per
        self.key = key

    def render_template_fields(self, context: Context, jinja_env: jinja2.Environment | None = None) -> None:
        """Do nothing: the fields are rendered for each run, and kept as their author wrote them."""

    def notify(self, context: Context) -> None:
        """Do the work, for 10 seconds at most; Airflow's ``__call__`` logs what is raised.

        :raises DelayedError: the store refuses, or does not answer in time.
        """
        store_conn_id, work, conn_ids = self._work(CallbackRun.of(context), context)
        calls_of(store_conn_id).call(work, conn_ids)

    async def async_notify(self, context: Context) -> None:
        """Do the work, for 10 seconds at most, and log what is raised.

        :raises DelayedError: the store refuses, or does not answer in time.
        """
        try:
            store_conn_id, work, conn_ids = self._work(CallbackRun.of(context), context)
            await calls_of(store_conn_id).call_async(work, conn_ids)
        except Exception as error:
            log.error("Failed to send notification (async): %s", explained(error))
            raise

    def _work(
        self, run: CallbackRun, context: Mapping[str, Any]
    ) -> tuple[str, Callable[[DelayedStoreHook], Any], Sequence[str]]:
        """Return the store, the work in it and the connections that the work needs."""
        rendered = self.rendered(context)
        # without its key a run is by itself
        alone = self.per == "dag" and self.key is not None and rendered["key"] is None
        attempt = run.attempt("run" if alone else self.per, rendered["key"])
        for problem in rendered.problems:
            log.warning("%s: %s", run, problem)
        return rendered["store_conn_id"], self.work(run, attempt, rendered, context), self.conn_ids(rendered)

    def conn_ids(self, rendered: RenderedFields) -> Sequence[str]:
        """Return the connections that the work needs."""
        return (rendered["store_conn_id"],)

    def rendered(self, context: Mapping[str, Any]) -> RenderedFields:
        """Return the fields for one run.

        :raises InputError: a field without which nothing can be done cannot be rendered.
        """
        dag: Any = context.get("dag")
        # a deadline has no DAG, and dag.test() passes the scheduler's
        env = self.get_template_env(dag if hasattr(dag, "get_template_env") else None)
        rendered = RenderedFields({name: getattr(self, name) for name in self.template_fields})
        values = cast("dict[str, Any]", rendered.values)
        for name, written in values.items():
            if not is_template(written):
                continue
            try:
                values[name] = self.render_template(written, cast("Any", context), env)
                if name == "key":
                    # a number, where the DAG renders native types
                    values[name] = str(values[name])
                    if not values[name]:
                        raise InvalidMessage("key", "is empty")
            except Exception as error:
                # the type alone, for the text of an error may show a secret
                problem = f"{name}= cannot be rendered ({type(error).__name__})"
                if name not in self.optional_fields:
                    raise InputError(f"{problem}, and without it nothing can be stored: {_undefined(error)}") from None
                values[name] = None
                rendered.problems.append(problem)
        return rendered

    @abstractmethod
    def work(
        self, run: CallbackRun, attempt: RunAttempt, rendered: RenderedFields, context: Mapping[str, Any]
    ) -> Callable[[DelayedStoreHook], Any]:
        """Return the work in the store."""

    def check_dag(self, dag: DAG, task_id: str | None, state: str) -> None:
        """Check whether this is a callback that the DAG can have, when the DAG is parsed.

        :param task_id: the task whose callback it is; None: it is the DAG's.
        :param state: "success" or "failed".
        :raises AirflowClusterPolicyViolation: it is not.
        """

    def kept(self) -> dict[str, Any] | None:
        """Return this notifier for the listener, as JSON can have it; None: it is of a class of the DAG's author."""
        if not type(self).__module__.startswith("airflow_delayed."):
            return None
        values = {name: getattr(self, name) for name in self.kept_arguments}
        spans = {name: one.total_seconds() for name, one in values.items() if isinstance(one, timedelta)}
        return {"class": type(self).__name__, "arguments": {**values, **spans}}

    @classmethod
    def of_kept(cls, kept: Mapping[str, Any]) -> StoreNotifier:
        """Return the notifier of :meth:`kept`."""
        return cls(**kept["arguments"])


class MessageNotifier(StoreNotifier, ABC):
    """The base of the notifiers that store a message; the parameters are those of :class:`DelayedNotifier`."""

    template_fields: Sequence[str] = (
        *StoreNotifier.template_fields,
        "conn_id",
        "destination",
        "delay",
        "value",
        "headers",
    )
    optional_fields: Sequence[str] = (*StoreNotifier.optional_fields, "value", "headers")
    kept_arguments: Sequence[str] = (*StoreNotifier.kept_arguments, "conn_id", "destination", "delay")
    stores = True

    def __init__(
        self,
        *,
        conn_id: str,
        destination: str,
        delay: timedelta | float | str,
        store_conn_id: str | None = None,
        value: Any = None,
        headers: Mapping[str, str] | None = None,
        per: Per = "run",
        key: str | None = None,
        context: Context | None = None,
    ) -> None:
        super().__init__(store_conn_id=store_conn_id, per=per, key=key, context=context)
        self.conn_id = conn_id
        self.destination = destination
        self.delay = delay
        self.value = value
        self.headers = headers
        self._literal = value is not None and not is_template(value)
        self._kept_id: str | None = None
        if not is_template(delay):
            delay_of(delay)
        if context is None:
            # after a deadline an error would lose the escalation
            self._check_literals()

    def _check_literals(self) -> None:
        """Check what is no template, while the DAG is parsed.

        :raises ValueError: an argument cannot be what it is for.
        """
        for name in ("conn_id", "store_conn_id"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ValueError(f"{type(self).__name__}: {name}= must be the id of a connection")
        try:
            if not is_template(self.destination):
                _check_destination(self.destination, in_store=self.conn_id == self.store_conn_id)
            if self.value is not None:
                body_of(self.value)
            if self.headers is not None and not is_template(self.headers):
                check_headers(self.headers)
        except InvalidMessage as error:
            name = {"body": "value"}.get(error.column, error.column)
            raise ValueError(f"{type(self).__name__}: {name}= {error.problem}") from None

    def conn_ids(self, rendered: RenderedFields) -> Sequence[str]:
        """Return the store's connection, and the one that delivers."""
        return (*super().conn_ids(rendered), rendered["conn_id"])

    def _arming(
        self, run: CallbackRun, attempt: RunAttempt, rendered: RenderedFields
    ) -> Callable[[DelayedStoreHook], ArmOutcome]:
        """Return what stores the message for a failed run."""
        wanted = self._escalation(run, attempt, rendered)
        conn_id, store_conn_id = rendered["conn_id"], rendered["store_conn_id"]

        def arm(store: DelayedStoreHook) -> ArmOutcome:
            fitting = wanted if conn_id == store_conn_id else self._fitting(run, attempt, rendered, wanted)
            outcome, message_id = store.arm(fitting, deliver_conn_id=conn_id, origin=run.origin)
            _report(run, outcome.value, message_id, fitting.message)
            if outcome.value == "stored" and not store.is_served(conn_id):
                log.warning(
                    "no dispatcher of store %r was there within a day for connection %r: let a StoreDispatchOperator"
                    " with this connection in its deliver_conn_ids run",
                    store_conn_id,
                    conn_id,
                )
            return outcome

        return arm

    def _escalation(self, run: CallbackRun, attempt: RunAttempt, rendered: RenderedFields) -> Escalation:
        from airflow_delayed.store.api import Escalation, RunFailures

        body, headers, problems = rendered["value"], rendered["headers"], list(rendered.problems)
        try:
            body = None if body is None else body_of(body)
        except InvalidMessage as error:
            body = None
            problems.append(f"value= {error.problem}")
        try:
            check_headers(headers := headers or {})
        except InvalidMessage as error:
            headers = {}
            problems.append(f"headers= {error.problem}")
        failure = self._described(run, attempt, rendered, "; ".join(problems) or None)
        named = key_id(("run", "failure"), (attempt.name, run.failure_of(self.per)))
        beginning = self._beginning(attempt)
        message = DelayedMessage(
            destination=rendered["destination"],
            body=RunFailures([failure], 1).body() if body is None else body,
            due_at=due_after(run.failed_at, delay_of(rendered["delay"])),
            message_id=f"{beginning}{named}",
            headers=dict(headers),
            tag=attempt.tag,
        )
        return Escalation(attempt=attempt, message=message, failure=failure, beginning=beginning)

    def _described(
        self, run: CallbackRun, attempt: RunAttempt, rendered: RenderedFields, problem: str | None
    ) -> RunFailure:
        """Return the failure as the message has it."""
        return run.described(attempt, base_url(), problem)

    def _beginning(self, attempt: RunAttempt) -> str:
        """Return how the ids of messages begin of which one waits at a time."""
        return f"{ids_of(attempt.tag)}{self._own_id()}-"

    def kept(self) -> dict[str, Any] | None:
        """Return this notifier for the listener: without value and headers, and with the id that it has by them."""
        kept = super().kept()
        return kept and {**kept, "own_id": self._own_id()}

    @classmethod
    def of_kept(cls, kept: Mapping[str, Any]) -> StoreNotifier:
        """Return the notifier of :meth:`kept`: its messages have the same ids, and the default body."""
        made = cls(**kept["arguments"])
        made._kept_id = kept["own_id"]
        return made

    def _own_id(self) -> str:
        """Return what tells this notifier from others of the DAG: by all arguments, as the author wrote them."""
        if self._kept_id is not None:
            return self._kept_id
        written = {name: getattr(self, name) for name in (*self.template_fields, "per")}
        if not is_template(self.delay):
            written["delay"] = str(delay_of(self.delay))
        return key_id(("notifier",), (json.dumps(written, sort_keys=True, default=repr),))[:8]

    def _fitting(
        self, run: CallbackRun, attempt: RunAttempt, rendered: RenderedFields, wanted: Escalation
    ) -> Escalation:
        """Return the message, with the default body and without headers if the transport refuses its author's.

        :raises InputError: ``conn_id`` is another store.
        :raises LimitExceeded: the transport would refuse the default body too.
        """
        with closing(delivery.delivery_for(rendered["conn_id"])) as transport:
            if transport.is_store:
                raise InputError(
                    f"connection {rendered['conn_id']!r} is a store itself, and what waits in"
                    f" {rendered['store_conn_id']!r} cannot be delivered through it; pass"
                    f" store_conn_id={rendered['conn_id']!r} for a queue table there, or a conn_id of RabbitMQ or SQS"
                )
            try:
                transport.check(wanted.message, wanted.message.due_at)
            except LimitExceeded as error:
                if rendered["value"] is None and not rendered["headers"]:
                    raise
                log.warning("%s: %s; the message has the default body and no headers", run, error)
                problems = [*rendered.problems, f"value= or headers= exceed a limit ({error.column})"]
                plain = RenderedFields({**rendered.values, "value": None, "headers": None}, problems)
                wanted = self._escalation(run, attempt, plain)
                transport.check(wanted.message, wanted.message.due_at)
        return wanted


class DelayedNotifier(MessageNotifier):
    """Stores a message that is due some time after a failure, unless a :class:`DelayedCancelNotifier` takes it back.

    As ``on_failure_callback`` it escalates what is still red after a delay. The message waits in the store until it is
    due, whatever the lookahead of the dispatcher is, and can be taken back until then; so it arrives late by the time
    between two dispatches. While a message of the same notifier waits, a further failure joins it: its due time stays,
    for what is red goes on being red since the first failure. A failure whose run has succeeded in the meantime stores
    nothing, in whatever order Airflow makes its callbacks.

    :param conn_id: the connection that delivers: of type ``aws``, ``rabbitmq`` or ``amqp``; or ``store_conn_id``, where
        the destination is a queue table in that database.
    :param store_conn_id: a SQL connection, in whose store the message waits, until a StoreDispatchOperator with
        ``conn_id`` in its ``deliver_conn_ids`` dispatches it.
    :param destination: the queue.
    :param delay: a timedelta or seconds, counted from the failure: the end of the run; for a task's callback, the end
        of its last try; for a DeadlineAlert, the deadline.
    :param value: the body: text, bytes, or a list or dictionary for JSON. By default JSON with ``dag_id``, ``run_id``,
        ``failed_at`` and more of the failures; the header ``airflow-escalation`` always has these. A DeadlineAlert
        stores its arguments in the clear in Airflow's database: pass no secret there, see the page "Notifiers" of the
        documentation.
    :param headers: text by text.
    :param per: "run": a success takes back the message of its own run alone. "dag": for a DAG whose later run replaces
        the earlier one: a success of a scheduled run takes back what older scheduled runs have stored, too; a run that
        is not scheduled is still by itself. "task": each task instance by itself, for callbacks of tasks.
    :param key: narrows the runs that belong together, such as ``"{{ params.customer }}"``.
    :param context: Airflow's, when it makes the notifier for a DeadlineAlert.
    :raises ValueError: an argument is missing or wrong.
    """

    def work(
        self, run: CallbackRun, attempt: RunAttempt, rendered: RenderedFields, context: Mapping[str, Any]
    ) -> Callable[[DelayedStoreHook], ArmOutcome]:
        """Return what stores the message."""
        if "deadline" in context and self._literal:
            log.warning(
                "%s: the body of this notifier is no template, and Airflow keeps the arguments of a DeadlineAlert in"
                " the clear; leave value= out, or write a template that names the place of the content",
                run,
            )
        return self._arming(run, attempt, rendered)


class DelayedCancelNotifier(StoreNotifier):
    """Takes back what :class:`DelayedNotifier` has stored for this run, and what is not yet due.

    As ``on_success_callback`` it ends an escalation. It remembers the success for as long as the store remembers ids,
    so that a callback of an earlier failure that comes later stores nothing. A message that a dispatcher has taken
    while this run was at work is a warning in the log: it came too late.

    :param store_conn_id: as the DelayedNotifier's.
    :param per: as the DelayedNotifier's.
    :param key: as the DelayedNotifier's.
    :param context: Airflow's, when it makes the notifier for a DeadlineAlert.
    :raises ValueError: an argument is missing or wrong.
    """

    def __init__(
        self,
        *,
        store_conn_id: str | None = None,
        per: Per = "run",
        key: str | None = None,
        context: Context | None = None,
    ) -> None:
        super().__init__(store_conn_id=store_conn_id, per=per, key=key, context=context)

    def work(
        self, run: CallbackRun, attempt: RunAttempt, rendered: RenderedFields, context: Mapping[str, Any]
    ) -> Callable[[DelayedStoreHook], TakenBack]:
        """Return what cancels the messages, and logs how many came in time."""

        def take_back(store: DelayedStoreHook) -> TakenBack:
            taken = store.take_back(attempt, actor=str(run))
            if changed := taken.outcomes.changed:
                log.info("%s: %s messages taken back", run, f"{changed:,}")
            for message_id in taken.reduced:
                log.info("%s: %s waits for other failures, and no longer for this run's", run, message_id)
            late = [message_id for message_id, outcome in taken.outcomes.items() if outcome == "in flight"]
            if attempt.started_at is not None:
                for tag in dict.fromkeys((attempt.tag, *attempt.other_tags)):
                    late += store.dispatched_since(ids_of(tag), attempt.started_at)
            for message_id in dict.fromkeys(late):
                log.warning("%s: too late to take back %s: a dispatcher has handed it over", run, message_id)
            return taken

        return take_back


def base_url() -> str:
    """Return the address of Airflow for links; empty: it is not configured."""
    return conf.get("api", "base_url", fallback="") or ""


def _report(run: CallbackRun, outcome: str, message_id: str, message: DelayedMessage) -> None:
    texts = {
        "stored": f"{message_id} to {message.destination} is due {message.due_at.isoformat()}",
        "joined": f"{message_id}, which waits for an earlier failure, stands for this one too",
        "known": f"{message_id} was stored for this failure before",
        "succeeded": "nothing is stored: the run, or a later run that replaces it, has succeeded since this failure",
    }
    log.info("%s: %s", run, texts[outcome])


def _check_destination(destination: object, *, in_store: bool) -> None:
    if not isinstance(destination, str) or not destination:
        raise InvalidMessage("destination", "must be the name of a queue, and is empty or not text")
    check_text("destination", destination)
    if (length := len(destination)) > MAX_DESTINATION:
        raise InvalidMessage("destination", f"has {length} characters; the store keeps up to {MAX_DESTINATION}")
    if in_store and (size := len(destination.encode())) > MAX_QUEUE_NAME:
        raise InvalidMessage("destination", f"has {size} bytes; the name of a queue table has up to {MAX_QUEUE_NAME}")


def _undefined(error: Exception) -> str:
    """Return the name that a template lacks: no other error's text is safe to show."""
    from jinja2 import UndefinedError

    return str(error) if isinstance(error, UndefinedError) else "look at its template"


def is_template(value: object) -> bool:
    """Return whether a text, or one in a list or dictionary, is a template."""
    if isinstance(value, Mapping):
        return any(map(is_template, (*value, *value.values())))
    if isinstance(value, list | tuple):
        return any(map(is_template, value))
    return isinstance(value, str) and ("{{" in value or "{%" in value)
