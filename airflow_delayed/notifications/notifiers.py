"""DelayedNotifier and DelayedCancelNotifier: a message that is due some time after a failure, unless its run succeeds.

Airflow calls a DAG's callbacks in the DAG processor, a task's on the worker, a DeadlineAlert's in the triggerer (async)
or by the executor (sync), in any order. Both make their ids of the run, so each finds what the other has done.
"""

from __future__ import annotations

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime, timedelta
from threading import BoundedSemaphore
from typing import TYPE_CHECKING, Any, Literal, get_args
from urllib.parse import quote

from airflow.sdk import BaseNotifier

from airflow_delayed import delivery
from airflow_delayed.compat import KeepsTexts, conf
from airflow_delayed.errors import InputError, InvalidMessage, check_choice, explained
from airflow_delayed.fields import MAX_TAG
from airflow_delayed.identity import NOTIFIER, Origin, key_id
from airflow_delayed.intake.rows import body_of
from airflow_delayed.message import DelayedMessage, check_headers, delay_of, due_after, parse_moment, utcnow
from airflow_delayed.threads import in_thread

if TYPE_CHECKING:
    from airflow.sdk import Context

log = logging.getLogger(__name__)

#: What a failure and the success that ends it have in common.
Per = Literal["run", "task"]
#: Seconds that a callback waits for its store. Airflow ends the process of a DAG's callbacks after 50.
CALL_SECONDS = 10.0
#: By store, the callbacks of this process that ask it at a time: many deadlines of a triggerer may pass at once.
_at_once: dict[str, BoundedSemaphore] = defaultdict(lambda: BoundedSemaphore(4))


@dataclass(frozen=True, slots=True)
class CallbackRun:
    """The run that a callback is about, or the task in it.

    :param clears: how often it was cleared; 0 where Airflow does not say: for a deadline, or without a task.
    :param failed_at: the end of the run; of a task's callback that of its try; the deadline; or now.
    """

    origin: Origin
    clears: int
    failed_at: datetime
    reason: str | None

    @classmethod
    def of(cls, context: Mapping[str, Any]) -> CallbackRun:
        """Return the run of a context: of a DAG's callback, a task's, or a DeadlineAlert's."""
        run, ti, deadline = context.get("dag_run"), context.get("ti"), context.get("deadline")
        dag_id = _field(run, "dag_id") or context["dag"].dag_id
        # a deadline's run is as the REST API shows it
        run_id = _field(run, "dag_run_id") or _field(run, "run_id") or context["run_id"]
        task_id, map_index = _field(ti, "task_id") or "", _field(ti, "map_index")
        ended = _field(run, "end_date") or _field(ti, "end_date") or utcnow()
        return cls(
            Origin(dag_id=dag_id, run_id=run_id, task_id=task_id, map_index=-1 if map_index is None else map_index),
            _field(run, "clear_number") or 0,
            parse_moment("failed_at", ended if deadline is None else deadline["deadline_time"]),
            context.get("reason") if deadline is None else "deadline",
        )

    def ids(self, per: Per, key: str | None) -> Sequence[str]:
        """Return the message id of each number of clears up to this run's, which is the last."""
        one = self.origin
        names = ("dag_id", "run_id", "task_id", "map_index", "key", "clears")
        of = one.dag_id, one.run_id, *((one.task_id, one.map_index) if per == "task" else ("", -1)), key or ""
        return [key_id(names, (*of, number)) for number in range(self.clears + 1)]

    @property
    def tag(self) -> str:
        """The tag of all messages about this run."""
        tag = f"{NOTIFIER}{self.origin.dag_id}/{self.origin.run_id}"
        return tag if len(tag) <= MAX_TAG else f"{NOTIFIER}{key_id(('tag',), (tag,))}"

    def body(self, problems: Sequence[str]) -> bytes:
        """Return the default body: JSON, with the reasons why the message is not as its author wrote it."""
        dag_id, run_id, task_id = self.origin.dag_id, self.origin.run_id, self.origin.task_id
        base = conf.get("api", "base_url", fallback="").rstrip("/")
        values = {
            "dag_id": dag_id,
            "run_id": run_id,
            "task_id": task_id or None,
            "map_index": self.origin.map_index if self.origin.map_index >= 0 else None,
            "failed_at": self.failed_at.isoformat(),
            "reason": self.reason,
            "run_url": f"{base}/dags/{quote(dag_id, safe='')}/runs/{quote(run_id, safe='')}" if base else None,
            "problem": "; ".join(problems) or None,
        }
        known = {name: value for name, value in values.items() if value is not None}
        return json.dumps(known, ensure_ascii=False, separators=(",", ":")).encode()

    def __str__(self) -> str:
        return f"DAG {self.origin.dag_id}, run {self.origin.run_id}"


class StoreNotifier(KeepsTexts, BaseNotifier, ABC):
    """The base of the notifiers. One may be called for several runs: its fields stay as the DAG's author wrote them."""

    template_fields: Sequence[str] = ("store_conn_id", "key")

    def __init__(
        self, *, store_conn_id: str | None = None, per: Per = "run", key: str | None = None, context: Any = None
    ) -> None:
        super().__init__(context)
        if store_conn_id is None:
            raise ValueError(
                f"{type(self).__name__} needs store_conn_id=, a SQL connection with a store: a transport would take the"
                " message at once, and nobody could cancel it. TopologyInstallOperator installs one there, and a"
                " StoreDispatchOperator delivers"
            )
        check_choice("per", per, get_args(Per))
        self.store_conn_id = store_conn_id
        self.per = per
        self.key = key
        self._check_literals("store_conn_id", "key")

    def render_template_fields(self, context: Context, jinja_env: Any = None) -> None:
        """Do nothing: the fields are rendered for each run."""

    def notify(self, context: Context) -> None:
        """Do the work, for 10 seconds at most; Airflow's ``__call__`` logs what is raised."""
        from airflow_delayed.hooks.store import result_of

        run, (fields, problems) = CallbackRun.of(context), self._rendered(context)
        conn_ids = [fields[name] for name in ("store_conn_id", "conn_id") if name in fields]
        for conn_id in conn_ids:
            # no part of the seconds: the DAG processor makes an API of its own for the first one
            delivery.type_of(conn_id)

        def work() -> None:
            with _at_once[conn_ids[0]]:
                self.work(run, fields, problems)

        answer = in_thread(work)
        wait([answer], CALL_SECONDS)
        result_of(answer, CALL_SECONDS, conn_ids[0])

    async def async_notify(self, context: Context) -> None:
        """Do the work as :meth:`notify`, without holding the event loop, and log what is raised."""
        try:
            await asyncio.wrap_future(in_thread(lambda: self.notify(context), "delayed-notifier"))
        except Exception as error:
            log.error("Failed to send notification (async): %s", explained(error))
            raise

    @abstractmethod
    def work(self, run: CallbackRun, fields: Mapping[str, Any], problems: Sequence[str]) -> None:
        """Do the work in the store, with the template fields for this run; those with a problem are None."""

    def _check_literals(self, *names: str) -> None:
        for name in names:
            # a template may stand in a list or a dictionary
            if not any(mark in str(getattr(self, name)) for mark in ("{{", "{%")):
                _checked(name, getattr(self, name))

    def _rendered(self, context: Context) -> tuple[Mapping[str, Any], Sequence[str]]:
        dag: Any = context.get("dag")
        # a deadline has no DAG, and dag.test() passes the scheduler's
        env = self.get_template_env(dag if hasattr(dag, "get_template_env") else None)
        fields, problems = dict.fromkeys(self.template_fields), list[str]()
        for name in self.template_fields:
            try:
                fields[name] = _checked(name, self.render_template(getattr(self, name), context, env))
            except Exception as error:
                # another error's text may show a secret
                known = error.problem if isinstance(error, InvalidMessage) else None
                problem = f"{name}= {known or f'cannot be rendered ({type(error).__name__})'}"
                if name not in ("value", "headers"):
                    raise InputError(f"{problem}, and without it nothing can be done") from None
                problems.append(problem)
        return fields, problems


class DelayedNotifier(StoreNotifier):
    """Stores a message that is due some time after a failure, unless a :class:`DelayedCancelNotifier` cancels it.

    As ``on_failure_callback`` it escalates what is still red after a delay. No dispatcher takes the message before it
    is due, so it arrives late by the time between two dispatches. A failure that is heard twice stores one message.

    :param conn_id: the connection that delivers; ``store_conn_id``, if the destination is a queue table there.
    :param store_conn_id: a SQL connection, in whose store the message waits for a dispatcher that serves ``conn_id``.
    :param destination: the queue.
    :param delay: a timedelta or seconds, counted from the failure: the end of the run, of the task's try, the deadline.
    :param value: the body: text, bytes, or a list or dictionary for JSON; by default JSON about the failure.
    :param headers: text by text.
    :param per: "run", or "task" for callbacks of tasks, whose instances are red by themselves.
    :param key: tells several notifiers of a DAG from each other; a success cancels the messages of its own key.
    :param context: Airflow's, when it makes the notifier for a DeadlineAlert.
    :raises InvalidMessage: an argument that is no template is wrong.
    """

    template_fields: Sequence[str] = ("store_conn_id", "key", "conn_id", "destination", "delay", "value", "headers")

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
        if context is None:
            # after a deadline an error would lose the escalation
            self._check_literals("conn_id", "destination", "delay", "value", "headers")

    def work(self, run: CallbackRun, fields: Mapping[str, Any], problems: Sequence[str]) -> None:
        """Store the message."""
        from airflow_delayed.hooks.store import DelayedStoreHook

        for problem in problems:
            log.warning("%s: %s; the message has the default in its place", run, problem)
        conn_id, store_conn_id = fields["conn_id"], fields["store_conn_id"]
        message = DelayedMessage(
            destination=fields["destination"],
            body=run.body(problems) if fields["value"] is None else fields["value"],
            due_at=due_after(run.failed_at, fields["delay"]),
            message_id=run.ids(self.per, fields["key"])[-1],
            headers=fields["headers"] or {},
            tag=run.tag,
        )
        if conn_id != store_conn_id:
            with closing(delivery.delivery_for(conn_id)) as transport:
                if transport.is_store:
                    raise InputError(
                        f"connection {conn_id!r} is a store itself, and delivers nothing that waits in another; pass"
                        f" store_conn_id={conn_id!r} for a queue table there, or a conn_id of RabbitMQ or SQS"
                    )
                transport.check(message, message.due_at)
        hook = DelayedStoreHook(store_conn_id, conn_id, on_conflict="keep", origin=run.origin, until_due=True)
        with closing(hook) as store:
            stored = store.send([message]).sent
        outcome = f"is due {message.due_at}" if stored else "is known: it was stored before, or the run has succeeded"
        log.info("%s: %s to %s %s", run, message.message_id, message.destination, outcome)


class DelayedCancelNotifier(StoreNotifier):
    """Cancels what :class:`DelayedNotifier` has stored for this run, and what is not yet due.

    As ``on_success_callback`` it ends an escalation. The store remembers it as long as ids, so that a failure of this
    run that is heard later stores nothing.

    :param store_conn_id: as the DelayedNotifier's; so are ``per``, ``key`` and ``context``.
    """

    def work(self, run: CallbackRun, fields: Mapping[str, Any], problems: Sequence[str]) -> None:
        """Cancel the messages, and log what came too late."""
        from airflow_delayed.hooks.store import DelayedStoreHook

        with closing(DelayedStoreHook(fields["store_conn_id"])) as store:
            outcomes = store.cancel_or_remember(run.ids(self.per, fields["key"]), actor=str(run))
        for message_id, outcome in outcomes.items():
            if outcome.changed:
                log.info("%s: %s is cancelled", run, message_id)
            elif outcome in ("in flight", "dispatched"):
                log.warning("%s: too late to cancel %s: a dispatcher has taken it", run, message_id)


def _checked(name: str, value: Any) -> Any:
    """Return a field as the message has it; if it cannot be what it is for, raise InvalidMessage."""
    if value is None and name in ("key", "value", "headers"):
        return None
    if name in ("delay", "value"):
        return delay_of(value) if name == "delay" else body_of(value)
    if name == "headers":
        check_headers(value)
        return value
    # a number, where the DAG renders native types
    text = str(value) if name == "key" else value
    if not isinstance(text, str) or not text:
        raise InvalidMessage(name, "must be text, and not empty")
    return text


def _field(run: Any, name: str) -> Any:
    return run.get(name) if isinstance(run, Mapping) else getattr(run, name, None)
