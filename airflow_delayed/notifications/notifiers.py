"""DelayedNotifier and DelayedCancelNotifier: a message that is due some time after a failure, unless it is taken back.

Airflow calls a DAG's callbacks in the DAG processor, a task's on the worker, a DeadlineAlert's in the triggerer (async)
or by the executor (sync). None of these fails a task, so an error is logged and raised.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import closing
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from airflow.sdk import BaseNotifier

from airflow_delayed import delivery
from airflow_delayed.errors import InputError, explained
from airflow_delayed.identity import key_id
from airflow_delayed.intake.rows import body_of
from airflow_delayed.message import DelayedMessage, delay_of, due_after
from airflow_delayed.notifications.callback_run import CallbackRun, ids_of

if TYPE_CHECKING:
    import jinja2
    from airflow.sdk import Context

    from airflow_delayed.hooks.store import DelayedStoreHook

log = logging.getLogger(__name__)

#: Seconds that a notifier takes at most: Airflow ends the process of a DAG's callbacks after 50.
SECONDS = 10.0
#: The states of a message that failed for good or expired: it does not stand for a later failure.
GIVEN_UP = ("failed", "expired")


class StoreNotifier(BaseNotifier, ABC):
    """The base of the notifiers: work in a store, by a thread that is waited for at most 10 seconds.

    :param store_conn_id: the SQL connection of the store.
    :param per: "dag": a success of any run takes back the messages of all runs; "run": only of the same run.
    :param context: Airflow's, when it makes the notifier for a DeadlineAlert.
    """

    def __init__(self, *, store_conn_id: str | None, per: Literal["dag", "run"], context: Context | None) -> None:
        super().__init__(context)
        if store_conn_id is None:
            raise ValueError(
                f"{type(self).__name__} needs store_conn_id=, a SQL connection: a transport would take the message at"
                " once, and nobody could take it back. Install the store's tables there (TopologyInstallOperator), and"
                " let a StoreDispatchOperator run"
            )
        if per not in ("dag", "run"):
            raise ValueError(f"per={per!r} is neither 'dag' nor 'run'")
        self.store_conn_id = store_conn_id
        self.per = per
        self._templates: dict[str, Any] | None = None

    def render_template_fields(self, context: Context, jinja_env: jinja2.Environment | None = None) -> None:
        """Render the fields as the DAG's author wrote them: Airflow calls one notifier for several runs."""
        if self._templates is None:
            self._templates = {name: getattr(self, name) for name in self.template_fields}
        for name, template in self._templates.items():
            setattr(self, name, template)
        if jinja_env is None and not hasattr(context.get("dag"), "get_template_env"):
            # a deadline has no DAG, and dag.test() passes the scheduler's
            jinja_env = self.get_template_env()
        super().render_template_fields(context, jinja_env)

    def notify(self, context: Context) -> None:
        """Do the work, for 10 seconds at most; Airflow's ``__call__`` logs what is raised.

        :raises DelayedError: the store refuses, or does not answer in time.
        """
        from airflow_delayed.hooks.store import result_of

        self._look_up()
        answer = self._begin(context)
        wait([answer], SECONDS)
        result_of(answer, SECONDS, self.store_conn_id)

    async def async_notify(self, context: Context) -> None:
        """Do the work, for 10 seconds at most, and log what is raised.

        :raises DelayedError: the store refuses, or does not answer in time.
        """
        from airflow_delayed.hooks.store import in_thread, result_of

        try:
            await asyncio.wrap_future(in_thread(self._look_up))
            answer = self._begin(context)
            waiting = asyncio.wrap_future(answer)
            # else asyncio would log that nobody asked for an error that came too late
            waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
            await asyncio.wait([waiting], timeout=SECONDS)
            result_of(answer, SECONDS, self.store_conn_id)
        except Exception as error:
            log.error("Failed to send notification (async): %s", explained(error))
            raise

    def _look_up(self) -> None:
        """Let Airflow find the connections before the time begins.

        The DAG processor makes an API of its own for the first one, which took 20 seconds on a busy machine.
        """
        for conn_id in self.conn_ids():
            delivery.type_of(conn_id)

    def conn_ids(self) -> Sequence[str]:
        """Return the connections that the work needs."""
        return (self.store_conn_id,)

    def _begin(self, context: Context) -> Future[None]:
        from airflow_delayed.hooks.store import in_thread

        return in_thread(lambda: self.work(context))

    @abstractmethod
    def work(self, context: Mapping[str, Any]) -> None:
        """Do the work in the store."""


class DelayedNotifier(StoreNotifier):
    """Stores a message that is due some time after a failure, unless a :class:`DelayedCancelNotifier` takes it back.

    As ``on_failure_callback`` it escalates what is still red after a delay. The message waits in the store until it is
    due, whatever the lookahead of the dispatcher is, and can be taken back until then; so it arrives late by the time
    between two dispatches. While a message of the same notifier waits, a further failure stores none: what is red goes
    on being red since the first failure. A message that was taken back never comes back, but the next failure stores
    another.

    :param conn_id: the connection that delivers: of type ``aws``, ``rabbitmq`` or ``amqp``; or ``store_conn_id``, where
        the destination is a queue table in that database.
    :param store_conn_id: a SQL connection, in whose store the message waits, until a StoreDispatchOperator with
        ``conn_id`` in its ``deliver_conn_ids`` dispatches it.
    :param destination: the queue.
    :param delay: a timedelta or seconds, counted from the failure: the end of the run; for a task's callback, the end
        of its last try; for a DeadlineAlert, the deadline.
    :param value: the body: text, bytes, or a list or dictionary for JSON. By default JSON with ``dag_id``, ``run_id``
        and ``failed_at``. A DeadlineAlert stores its arguments in the clear in Airflow's database: pass no secret
        there, see the page "Notifiers" of the documentation.
    :param headers: text by text.
    :param per: "dag", or "run" if each run is red by itself and no other one's success ends that.
    :param context: Airflow's, when it makes the notifier for a DeadlineAlert.
    :raises ValueError: an argument is missing or wrong.
    """

    template_fields: Sequence[str] = ("conn_id", "store_conn_id", "destination", "delay", "value", "headers")

    def __init__(
        self,
        *,
        conn_id: str,
        destination: str,
        delay: timedelta | float | str,
        store_conn_id: str | None = None,
        value: Any = None,
        headers: Mapping[str, str] | None = None,
        per: Literal["dag", "run"] = "dag",
        context: Context | None = None,
    ) -> None:
        super().__init__(store_conn_id=store_conn_id, per=per, context=context)
        self.conn_id = conn_id
        self.destination = destination
        self.delay = delay
        self.value = value
        self.headers = headers
        self._literal = value is not None and not _is_template(value)
        if not _is_template(delay):
            delay_of(delay)

    def conn_ids(self) -> Sequence[str]:
        """Return the store's connection, and the one that delivers."""
        return (*super().conn_ids(), self.conn_id)

    def work(self, context: Mapping[str, Any]) -> None:
        """Store the message, unless one waits already."""
        run = CallbackRun.of(context)
        if "deadline" in context and self._literal:
            log.warning(
                "%s: the body of this notifier is no template, and Airflow keeps the arguments of a DeadlineAlert in"
                " the clear; leave value= out, or write a template that names the place of the content",
                run,
            )
        due = self._message(run)
        self._check_route(due)
        from airflow_delayed.hooks.store import DelayedStoreHook

        hook = DelayedStoreHook(self.store_conn_id, self.conn_id, on_conflict="keep", until_due=True)
        with closing(hook) as store:
            self._store(store, run, due)

    def _message(self, run: CallbackRun) -> DelayedMessage:
        tag, delay = run.tag(self.per), delay_of(self.delay)
        default = {"dag_id": run.dag_id, "run_id": run.run_id, "failed_at": run.failed_at.isoformat()}
        failure = key_id(("run_id", "failure"), (run.run_id, run.failure))
        return DelayedMessage(
            destination=self.destination,
            body=body_of(default if self.value is None else self.value),
            due_at=due_after(run.failed_at, delay),
            message_id=f"{self._ids(tag, delay)}{failure}",
            headers=dict(self.headers or {}),
            tag=tag,
        )

    def _ids(self, tag: str, delay: timedelta) -> str:
        """Return how the ids of this notifier's messages begin: a DAG may have several, with delays of their own."""
        own = key_id(("conn_id", "destination", "delay"), (self.conn_id, self.destination, str(delay)))
        return f"{ids_of(tag)}{own[:8]}-"

    def _check_route(self, due: DelayedMessage) -> None:
        """Check that the message can wait in the store, and then be delivered through ``conn_id``.

        :raises InputError: ``conn_id`` is another store.
        :raises LimitExceeded: the transport would refuse it.
        """
        if self.conn_id == self.store_conn_id:
            return
        with closing(delivery.delivery_for(self.conn_id)) as transport:
            if transport.is_store:
                raise InputError(
                    f"connection {self.conn_id!r} is a store itself, and what waits in {self.store_conn_id!r} cannot be"
                    f" delivered through it; pass store_conn_id={self.conn_id!r} for a queue table there, or a"
                    " conn_id of RabbitMQ or SQS"
                )
            transport.check(due, due.due_at)

    def _store(self, store: DelayedStoreHook, run: CallbackRun, due: DelayedMessage) -> None:
        assert due.tag is not None
        beginning = self._ids(due.tag, delay_of(self.delay))
        for one in store.list(tag=due.tag):
            if one.message_id.startswith(beginning) and one.state not in GIVEN_UP:
                log.info("%s: %s waits already, due %s", run, one.message_id, one.due_at.isoformat())
                return
        if store.send([due]).duplicates:
            log.info("%s: %s was stored for this failure before", run, due.message_id)
            return
        log.info("%s: %s to %s is due %s", run, due.message_id, due.destination, due.due_at.isoformat())
        if store.last_seen() is None:
            log.warning(
                "no dispatcher of store %r was there within a day for connection %r: let a StoreDispatchOperator with"
                " this connection in its deliver_conn_ids run",
                self.store_conn_id,
                self.conn_id,
            )


class DelayedCancelNotifier(StoreNotifier):
    """Takes back what :class:`DelayedNotifier` has stored for this DAG, and what is not yet due.

    As ``on_success_callback`` it ends an escalation: the next run's success does. A message that a dispatcher has
    taken while this run was at work is a warning in the log: it came too late.

    :param store_conn_id: as the DelayedNotifier's.
    :param per: as the DelayedNotifier's.
    :param context: Airflow's, when it makes the notifier for a DeadlineAlert.
    :raises ValueError: an argument is missing or wrong.
    """

    template_fields: Sequence[str] = ("store_conn_id",)

    def __init__(
        self,
        *,
        store_conn_id: str | None = None,
        per: Literal["dag", "run"] = "dag",
        context: Context | None = None,
    ) -> None:
        super().__init__(store_conn_id=store_conn_id, per=per, context=context)

    def work(self, context: Mapping[str, Any]) -> None:
        """Cancel all messages with the tag, and log how many came in time."""
        from airflow_delayed.hooks.store import DelayedStoreHook

        run = CallbackRun.of(context)
        tag = run.tag(self.per)
        with closing(DelayedStoreHook(self.store_conn_id)) as store:
            late = []
            # most runs find nothing, and a change is in the audit even then
            if any(store.list(tag=tag, limit=1)):
                outcomes = store.cancel(tag=tag, actor=str(run))
                log.info("%s: %s messages taken back", run, f"{outcomes.changed:,}")
                late += [message_id for message_id, outcome in outcomes.items() if outcome == "in flight"]
            if run.started_at is not None:
                late += store.dispatched_since(ids_of(tag), run.started_at)
        for message_id in dict.fromkeys(late):
            log.warning("%s: too late to take back %s: a dispatcher has handed it over", run, message_id)


def _is_template(value: object) -> bool:
    """Return whether a text, or one in a list or dictionary, is a template."""
    if isinstance(value, Mapping):
        return any(map(_is_template, (*value, *value.values())))
    if isinstance(value, list | tuple):
        return any(map(_is_template, value))
    return isinstance(value, str) and ("{{" in value or "{%" in value)
