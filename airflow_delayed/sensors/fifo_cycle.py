"""FifoCycleSensor: cycles the delay queues of SQS, in which messages wait for over 900 s."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseSensorOperator, PokeReturnValue, XComArg

from airflow_delayed import lineage, metrics
from airflow_delayed.compat import KEEPS_STATE, AirflowException, AirflowFailException, NeedsAirflow, conf
from airflow_delayed.errors import DelayedError, InputError, RetentionAtRisk
from airflow_delayed.links import DeliveriesLink
from airflow_delayed.message import plain_span
from airflow_delayed.operators.task_state import turn_of
from airflow_delayed.sqs.delay_queue import EMPTY, DelayQueueLoop, end_of
from airflow_delayed.sqs.settings import MAX_WAIT
from airflow_delayed.sqs.stats import CycleCounts

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_delayed.hooks.sqs import SqsDelayHook

#: Key in the task state store: the counts of a rescheduled sensor's earlier pokes.
_COUNTS = "airflow_delayed.cycled"

log = logging.getLogger(__name__)


class FifoCycleSensor(lineage.Traced, BaseSensorOperator):
    """Sends the messages of delay queues on, every 900 s, until they are delivered.

    A message that is due in over 900 s waits in ``<destination>-delay.fifo``, and is delivered late or, after 14 days,
    lost if no such sensor runs. Each poke sends on all visible messages: back for another 900 s, or to the destination
    with the remaining delay. Several sensors may run on one queue. For delays without end
    let it run without end: ``until=timedelta(hours=6)`` in a DAG with ``schedule="@continuous"``.

    Returns a summary: ``requeued`` for another round, ``delivered``, ``failed`` and ``undeleted`` (times),
    ``to_error_queue``, ``requests`` as SQS bills them, ``late_p99``, ``late_max`` and
    ``oldest_seconds``.

    Which queues:

    :param conn_id: a connection of type ``aws``.
    :param destination: one destination or several, as messages name them; not the names of their delay queues. Several
        are looked at one after another, so a message may be late by ``wait_time_seconds``; a sensor for each
        (``.partial(...).expand(destination=[...])``) is not.
    :param error_queue: the standard queue for messages that say neither how long they wait nor when they are due, by
        default ``<destination>-error``. It is made when the first comes; body and attributes are kept, and
        ``AirflowDelayed.Reason`` and ``AirflowDelayed.FromQueue`` say why and where from.

    When:

    :param until: "empty": done when the delay queues hold nothing, neither visible nor delayed nor in flight. Or when
        to end whatever is left: an aware time, ISO 8601 text with an offset, or a timedelta from the task's start.
    :param wait_time_seconds: how long each poke waits for a message to become visible, 0 to 20; shared among several
        destinations.
    :param empty_looks: how many looks in a row must find nothing before a queue counts as empty; each takes
        ``wait_time_seconds``. SQS's own counts are right only about a minute after the last change.
    :param poke_interval: seconds between two pokes: by default 1, and 60 in ``mode="reschedule"``. A message whose
        delay ends meanwhile is late by as much, which is logged when the DAG is parsed.
    :param deferrable: do the work in the triggerer, which needs no worker meanwhile. By default
        ``[operators] default_deferrable``.

    Safety:

    :param max_late: a message delivered later than that, by its ``AirflowDelayed.DueAt``, is a warning in the log.

    Result:

    :raises TopologyError: a delay queue or a destination does not exist; the others had their turn.
    :raises AccessDenied: the role may not do something with a queue; the others had their turn.
    :raises TransportUnavailable: SQS cannot be reached or refuses the connection; nothing is lost, a retry goes on.
    :raises AirflowFailException: a message had waited for over half of the queue's retention; all that could be sent
        on was. Or a name or template came out wrong.
    :raises ValueError: a parameter is not one of those above.
    """

    template_fields: Sequence[str] = ("conn_id", "destination", "until", "error_queue")
    template_fields_renderers: ClassVar[dict[str, str]] = {"destination": "json"}
    operator_extra_links = (DeliveriesLink(),)
    ui_color = "#e8f1fb"

    def __init__(
        self,
        *,
        conn_id: str = "aws_default",
        destination: str | Sequence[str] | XComArg,
        until: datetime | timedelta | str | XComArg = EMPTY,
        wait_time_seconds: int = MAX_WAIT,
        empty_looks: int = 3,
        error_queue: str | None = None,
        max_late: timedelta | None = None,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        poke_interval: timedelta | float | None = None,
        mode: str = "poke",
        **kwargs: Any,
    ) -> None:
        if not (isinstance(until, XComArg) or (isinstance(until, str) and "{" in until)):
            end_of(until, datetime.min)
        if not isinstance(destination, XComArg) and not destination:
            raise ValueError("destination is empty; name one queue at least")
        if not 0 <= wait_time_seconds <= MAX_WAIT:
            raise ValueError(f"wait_time_seconds={wait_time_seconds} must be 0 to {MAX_WAIT}")
        if empty_looks < 1:
            raise ValueError(f"empty_looks={empty_looks} must be 1 or more")
        if max_late is not None and (not isinstance(max_late, timedelta) or max_late < timedelta(0)):
            raise ValueError(f"max_late={max_late!r} must be a timedelta, and not negative")
        if mode == "reschedule" and not deferrable and not KEEPS_STATE:
            raise NeedsAirflow("mode='reschedule'", "3.3", "to add up what its pokes do; use deferrable=True")
        if poke_interval is None:
            poke_interval = 60 if mode == "reschedule" else 1
        super().__init__(poke_interval=poke_interval, mode=mode, **kwargs)
        self.conn_id = conn_id
        # XComArgs are rendered when it runs
        self.destination: Any = destination
        self.until: Any = until
        self.wait_time_seconds = wait_time_seconds
        self.empty_looks = empty_looks
        self.error_queue = error_queue
        self.max_late = None if max_late is None else plain_span("max_late", max_late)
        self.deferrable = deferrable
        self._rounds: DelayQueueLoop | None = None
        if self.reschedule and not deferrable:
            # no warning of Python's: that would be an error in the tests of many a DAG
            log.warning(
                "FifoCycleSensor %s is rescheduled every %.0f s: messages are up to that, and a worker's start, late."
                " deferrable=True or mode='poke' keep them within 2 s",
                self.task_id,
                self.poke_interval,
            )

    @cached_property
    def hook(self) -> SqsDelayHook:
        """The connection."""
        from airflow_delayed.hooks.sqs import SqsDelayHook

        return SqsDelayHook(self.conn_id)

    def execute(self, context: Context) -> Any:
        """Poke, or have the triggerer do it."""
        if not self.deferrable:
            return super().execute(context)
        return self._look_and_defer(self.hook.clock())

    def _look_and_defer(
        self, began: datetime, until: str | None = None, counts: CycleCounts | None = None
    ) -> dict[str, Any]:
        # one pass here: errors of the connection or of the queues are raised at once
        rounds = self._make_rounds(self.hook.clock(), wait_seconds=0, counts=counts, until=until)
        try:
            if self._go(rounds, once=True):
                return self._summary(rounds)
        finally:
            self.hook.close()
        from airflow_delayed.triggers.fifo_cycle import FifoCycleTrigger, until_text

        until = until_text(rounds.end)
        self.defer(
            trigger=FifoCycleTrigger(
                conn_id=self.conn_id,
                destinations=self._names,
                until=until,
                wait_time_seconds=self.wait_time_seconds,
                poke_interval=self.poke_interval,
                empty_looks=self.empty_looks,
                error_queue=self.error_queue,
                max_late_seconds=None if self.max_late is None else self.max_late.total_seconds(),
                counts=rounds.counts.to_json(),
            ),
            method_name="execute_complete",
            kwargs={"until": until, "began": began.isoformat()},
            # what is left of it, however often the task was resumed
            timeout=max(began + timedelta(seconds=self.timeout) - self.hook.clock(), timedelta(seconds=1)),
        )
        raise AssertionError("unreachable: defer has raised")

    def execute_complete(
        self,
        context: Context,
        event: dict[str, Any] | None = None,
        until: str | None = None,
        began: str | None = None,
    ) -> dict[str, Any]:
        """Return the trigger's summary, or fail as it did; defer again if the task was resumed without an event.

        :param until: the trigger's argument.
        :param began: when the task was first deferred, ISO 8601 text; its timeout counts from then.
        """
        first = self.hook.clock() if began is None else datetime.fromisoformat(began)
        if event is None:
            # apache/airflow#65248
            self.log.warning("resumed although the trigger has not ended; going on")
            return self._look_and_defer(first, until)
        if event["status"] == "retention":
            raise AirflowFailException(event["error"])
        if event["status"] != "done":
            raise AirflowException(event["error"])
        if until not in (None, EMPTY) and self.hook.clock() < datetime.fromisoformat(str(until)):
            return self._look_and_defer(first, until, CycleCounts.from_json(event.get("counts") or {}))
        summary: dict[str, Any] = event["summary"]
        self.log.info("done: %s", summary)
        self._name()
        return summary

    def poke(self, context: Context) -> PokeReturnValue:
        """Send on the visible messages, and return whether this was the last time."""
        if self._rounds is None:
            began = self.hook.clock()
            counts = None
            if self.reschedule:
                # each poke is a process of its own
                began = context["ti"].get_first_reschedule_date(context) or began
                kept: Any = context["task_state_store"].get(_COUNTS)
                # a task that is cleared after it failed counts from zero
                if isinstance(kept, Mapping) and kept.get("turn") == turn_of(context):
                    counts = CycleCounts.from_json(kept["counts"])
            self._rounds = self._make_rounds(began, self.wait_time_seconds, counts)
        done = self._go(self._rounds)
        if self.reschedule:
            if done:
                context["task_state_store"].delete(_COUNTS)
            else:
                kept = {"turn": turn_of(context), "counts": self._rounds.counts.to_json()}
                context["task_state_store"].set(_COUNTS, kept)
        return PokeReturnValue(done, self._summary(self._rounds) if done else None)

    @property
    def _names(self) -> list[str]:
        return [self.destination] if isinstance(self.destination, str) else list(self.destination)

    def _make_rounds(
        self, began: datetime, wait_seconds: int, counts: CycleCounts | None = None, until: str | None = None
    ) -> DelayQueueLoop:
        try:
            return DelayQueueLoop(
                self.hook,
                self._names,
                end=end_of(until or self.until, began),
                wait_seconds=wait_seconds,
                looks=self.empty_looks,
                error_queue=self.error_queue or None,
                max_late=self.max_late,
                counts=counts,
                meter=metrics.count_cycled(self.conn_id),
            )
        except ValueError as error:
            # the value of a template cannot be used, and would be the same in a retry
            raise AirflowFailException(str(error)) from error

    def _go(self, rounds: DelayQueueLoop, *, once: bool = False) -> bool:
        try:
            return rounds.go(once=once)
        except RetentionAtRisk as error:
            # a retry would succeed, and hide that half of the retention had passed
            rounds.log_counts()
            raise AirflowFailException(str(error)) from error
        except InputError as error:
            raise AirflowFailException(str(error)) from error
        except DelayedError:
            rounds.log_counts()
            raise

    def _summary(self, rounds: DelayQueueLoop) -> dict[str, Any]:
        rounds.log_counts()
        self._name()
        return rounds.summary()

    def _name(self) -> None:
        """Report the delay queues and their destinations to OpenLineage."""
        names = self._names[: lineage.MOST_DATASETS]

        def datasets(*, fifo: bool) -> list[lineage.Dataset]:
            return [self.hook.dataset(name, fifo=fifo) for name in names]

        self._trace(lambda: (datasets(fifo=True), datasets(fifo=False)))
