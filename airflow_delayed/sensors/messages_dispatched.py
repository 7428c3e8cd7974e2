"""MessagesDispatchedSensor: waits until messages of a store are dispatched, cancelled or given up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from shlex import quote
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from airflow.sdk import BaseSensorOperator, PokeReturnValue

from airflow_delayed.compat import AirflowException, AirflowFailException, AirflowSkipException, conf
from airflow_delayed.criteria import UNSET, Unset
from airflow_delayed.delivery import Clock
from airflow_delayed.errors import InputError, check_choice
from airflow_delayed.identity import SentBy
from airflow_delayed.links import DeliveriesLink
from airflow_delayed.message import utcnow
from airflow_delayed.operators.change import CRITERIA, SelectsMessages
from airflow_delayed.operators.task_state import task_state, turn_of
from airflow_delayed.triggers.messages_dispatched import Look, MessagesDispatchedTrigger, MessageSelection

if TYPE_CHECKING:
    from airflow.sdk import Context

#: Ids that a sensor takes at most: they are kept in Airflow's database while it is deferred.
MAX_IDS = 10_000
#: Key in the task state store: how many messages a rescheduled sensor's earlier pokes saw.
_SEEN = "airflow_delayed.seen"


class MessagesDispatchedSensor(SelectsMessages, BaseSensorOperator):
    """Waits until messages of a store wait no longer: each was dispatched, cancelled or given up.

    By default these are the messages of its own DAG run, those that a send handed to the transport at once included, if
    the send had this store; messages of notifiers are not. A message is dispatched when its transport has confirmed it:
    in a queue table it is then there; through RabbitMQ or SQS it may be due some minutes later (``lookahead`` of the
    dispatcher).

    The store knows messages that have left it for as long as ids are remembered, by default 14 days. Messages that it
    forgets while the sensor waits count as ``forgotten``. Of messages that it knows nothing of, the sensor claims
    nothing: see ``on_missing``. A copy of a message that another run stored before is that run's message.

    Returns the counts: ``total``, and by outcome ``dispatched``, ``cancelled``, ``failed``, ``expired``,
    ``dead_lettered`` (sent to the error destination), ``purged``, ``erased``, ``waiting`` (0) and ``forgotten``.

    Which messages; without any of these, the messages of this DAG run:

    :param ids: the ids of messages, up to 10,000: a list or one id, or what DelayedSendOperators of up to 100 messages
        returned.
    :param tag: as ChangeOperator's; so are ``destination``, ``deliver_conn_id``, ``due_from``, ``due_until`` and
        ``sent_by``.

    The store:

    :param store_conn_id: as ChangeOperator's; so are ``table`` and ``schema``.

    When:

    :param poke_interval: seconds between two looks.
    :param deferrable: wait in the triggerer, which needs no worker meanwhile. By default
        ``[operators] default_deferrable``.
    :param timeout: how long it may wait until it fails, a timedelta or seconds; by default
        ``[sensors] default_timeout``, seven days.

    Safety:

    :param on_given_up: what to do if messages were given up, those with the outcomes ``failed``, ``expired``,
        ``dead_lettered`` and ``purged``: "fail" when no other waits any more, or "succeed" with a warning.
    :param on_missing: what to do if the store knows none of the messages, or not all of ``ids``: "fail" at once,
        "wait" for them, or "succeed" with a warning, as for a run that may have had nothing to send.

    Result:

    :raises AirflowFailException: messages were given up or are missing, unless that may be; or a parameter, as it was
        rendered, cannot be.
    :raises AirflowSensorTimeout: messages still wait; with ``soft_fail=True`` the task is skipped.
    :raises TransportUnavailable: the store cannot be reached, by a look on the worker.
    :raises ValueError: a parameter is not one of those above.
    """

    template_fields: Sequence[str] = ("store_conn_id", "ids", *CRITERIA, "table", "schema")
    template_fields_renderers: ClassVar[dict[str, str]] = {"ids": "json", "sent_by": "json"}
    #: The present; a test sets another.
    clock: Clock = staticmethod(utcnow)
    operator_extra_links = (DeliveriesLink(),)
    ui_color = "#e8f1fb"

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
        table: str = "delayed_messages",
        schema: str | None = None,
        poke_interval: timedelta | float = 30,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        on_given_up: Literal["fail", "succeed"] = "fail",
        on_missing: Literal["fail", "wait", "succeed"] = "fail",
        **kwargs: Any,
    ) -> None:
        check_choice("on_given_up", on_given_up, ("fail", "succeed"))
        check_choice("on_missing", on_missing, ("fail", "wait", "succeed"))
        super().__init__(poke_interval=poke_interval, **kwargs)
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
        self.table = table
        self.schema = schema
        self.deferrable = deferrable
        self.on_given_up = on_given_up
        self.on_missing = on_missing
        self._seen = 0

    def execute(self, context: Context) -> Any:
        """Poke, or have the triggerer do it."""
        if not self.deferrable:
            return super().execute(context)
        try:
            return self._look_and_defer(context, self.clock())
        except AirflowFailException as error:
            # as Airflow does for a sensor that pokes, or is resumed
            if self.soft_fail:
                raise AirflowSkipException(str(error)) from error
            raise

    def poke(self, context: Context) -> PokeReturnValue:
        """Look, and return whether no message waits any more."""
        if self.reschedule:
            # each poke is a process of its own
            self._seen = self._kept(context)
        before, look = self._seen, self._look(context)
        result = self._result(look)
        state = task_state(context) if self.reschedule else None
        if state is not None and look.seen != before:
            state.set(_SEEN, {"turn": turn_of(context), "seen": look.seen})
        return PokeReturnValue(result is not None, result)

    def execute_complete(
        self, context: Context, event: dict[str, Any] | None = None, began: str | None = None
    ) -> dict[str, Any]:
        """Return the counts of the trigger's event, or fail; defer again if the task was resumed without an event.

        :param began: when the task was first deferred, ISO 8601 text; its timeout counts from then.
        """
        first = self.clock() if began is None else datetime.fromisoformat(began)
        if event is None:
            # apache/airflow#65248
            self.log.warning("resumed although the trigger has not ended; going on")
            return self._look_and_defer(context, first)
        if event["status"] == "failed":
            raise AirflowException(event["error"])
        return self._ended(event["counts"], unknown=event["status"] == "unknown")

    def _look_and_defer(self, context: Context, began: datetime) -> dict[str, Any]:
        # one look here: errors are raised at once
        look = self._look(context)
        if (result := self._result(look)) is not None:
            return result
        selection = self._messages(context)
        self.defer(
            trigger=MessagesDispatchedTrigger(
                self.store_conn_id,
                selection.to_json(),
                poke_interval=self.poke_interval,
                on_missing=self.on_missing,
                table=self.table,
                schema=self.schema,
                seen=look.seen,
            ),
            method_name="execute_complete",
            kwargs={"began": began.isoformat()},
            # what is left of it, however often the task was resumed
            timeout=max(began + timedelta(seconds=self.timeout) - self.clock(), timedelta(seconds=1)),
        )
        raise AssertionError("unreachable: defer has raised")

    def _messages(self, context: Context) -> MessageSelection:
        try:
            criteria = self.selection()
        except InputError as error:
            raise AirflowFailException(str(error)) from error
        if len(criteria.get("ids", ())) > MAX_IDS:
            raise AirflowFailException(
                f"ids= has {len(criteria['ids']):,} ids, of at most {MAX_IDS:,}; pass sent_by= or tag= instead"
            )
        if not criteria:
            ti = context["ti"]
            criteria = {"sent_by": SentBy(dag_id=ti.dag_id, run_id=ti.run_id)}
        return MessageSelection(self.store_conn_id, self.table, self.schema, criteria)

    def _look(self, context: Context) -> Look:
        selection = self._messages(context)
        try:
            look = selection.look(self._seen)
        except (InputError, ValueError) as error:
            raise AirflowFailException(str(error)) from error
        self._seen = look.seen
        self.log.info("%s", look)
        return look

    def _result(self, look: Look) -> dict[str, Any] | None:
        """Return the counts, or None if there is something to wait for.

        :raises AirflowFailException: messages were given up or are missing, unless that may be.
        """
        return self._ended(look.counts, unknown=look.unknown) if look.ends(self.on_missing) else None

    def _ended(self, counts: dict[str, int], *, unknown: bool) -> dict[str, Any]:
        if unknown:
            self._report_missing(counts)
        given_up = {name: counts[name] for name in ("failed", "expired", "dead_lettered", "purged") if counts[name]}
        if given_up:
            outcomes = ", ".join(f"{number:,} {name.replace('_', '-')}" for name, number in given_up.items())
            text = f"of {counts['total']:,} messages {sum(given_up.values()):,} were given up: {outcomes}"
            if self.on_given_up == "fail":
                raise AirflowFailException(
                    f"{text}. See airflow delayed list --store-conn-id {quote(self.store_conn_id)} --state failed"
                    " --state expired; airflow delayed retry lets failed messages wait again. If that may be, pass"
                    " on_given_up='succeed'"
                )
            self.log.warning("%s", text)
        return dict(counts)

    def _report_missing(self, counts: Mapping[str, int]) -> None:
        what = "no such message" if not counts["total"] else f"only {counts['total']:,} of the messages"
        text = f"store {self.store_conn_id!r} knows {what}"
        if self.on_missing == "fail":
            raise AirflowFailException(
                f"{text}. They were sent without this store (store_conn_id=), or are copies of another run's messages,"
                " or their ids are forgotten ([delayed] remember). If there may be none, pass on_missing='succeed'; if"
                " they come later, 'wait'"
            )
        self.log.warning("%s", text)

    def _kept(self, context: Context) -> int:
        state = task_state(context)
        kept: Any = None if state is None else state.get(_SEEN)
        # a task that is cleared counts from zero
        return int(kept["seen"]) if isinstance(kept, Mapping) and kept.get("turn") == turn_of(context) else 0
