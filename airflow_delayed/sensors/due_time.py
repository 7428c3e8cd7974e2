"""DueTimeSensor: waits until a time, in the triggerer."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseSensorOperator, XComArg
from airflow.triggers.base import StartTriggerArgs

from airflow_delayed.compat import RENDERS_TRIGGERS, AirflowFailException, NeedsAirflow
from airflow_delayed.delivery import Clock
from airflow_delayed.errors import InputError
from airflow_delayed.message import parse_moment, utcnow
from airflow_delayed.triggers.base import class_path
from airflow_delayed.triggers.due_time import DueTimeTrigger

if TYPE_CHECKING:
    from airflow.sdk import Context


class DueTimeSensor(BaseSensorOperator):
    """Waits until a time without a worker: never ends early, and its trigger fires milliseconds after the time.

    It takes the place of Airflow's DateTimeSensorAsync, whose trigger looks at the clock once a second, and has its
    parameters; but a time without a zone is an error, and ``timeout`` holds. A time that has passed ends it at once.

    When:

    :param target_time: an aware time, or ISO 8601 text with an offset; may be a template.
    :param timeout: how long it may wait until it fails, counted from when it is deferred: a timedelta or seconds; None:
        for ever, unlike the sensors that poke.

    Without a worker:

    :param start_from_trigger: let the scheduler start the trigger, so that no worker is needed before the wait. The
        template is rendered in the triggerer, so a time that cannot be read fails the task there. Needs Airflow 3.3. A
        mapped task begins on a worker all the same, since Airflow would give all its instances the same trigger
        (apache/airflow#48009).
    :param end_from_trigger: let the triggerer end the task as a success, within about a second; else a worker starts
        for it, two to three seconds later. Airflow then makes no events for ``outlets`` and calls neither
        ``on_success_callback`` nor ``post_execute``, nor, with ``start_from_trigger``, ``on_execute_callback`` and
        ``pre_execute``; so these are refused. ``on_failure_callback`` and ``on_retry_callback`` are called.

    Result:

    :raises InvalidMessage: ``target_time`` is no time, or has no zone (NaiveTime); that of a template when it runs.
    :raises ValueError: end_from_trigger is set, and outlets or a callback that Airflow would not call; or
        start_from_trigger, and another task's output.
    :raises NeedsAirflow: start_from_trigger is set, and Airflow cannot render the template in the triggerer.
    """

    template_fields: Sequence[str] = ("target_time",)
    #: The present; a test sets another.
    clock: Clock = staticmethod(utcnow)
    ui_color = "#e8f1fb"

    def __init__(
        self,
        *,
        target_time: datetime | str | XComArg,
        start_from_trigger: bool = False,
        end_from_trigger: bool = False,
        timeout: timedelta | float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(timeout=timeout, **kwargs)
        if end_from_trigger:
            self._check_end_from_trigger(start_from_trigger=start_from_trigger)
        self.target_time = target_time
        self.end_from_trigger = end_from_trigger
        self.wait_limit = None if timeout is None else timedelta(seconds=self.timeout)
        # a template is checked when it is rendered
        text = target_time if isinstance(target_time, str) and "{" in target_time else None
        if text is None and not isinstance(target_time, XComArg):
            text = self._moment().isoformat()
        if start_from_trigger:
            self._start_from_trigger(text)

    def _check_end_from_trigger(self, *, start_from_trigger: bool) -> None:
        """Refuse what Airflow would ignore.

        It asks the DAG processor for a callback when a trigger ends a task, which then calls those of failures alone.
        """
        if self.outlets:
            raise ValueError("end_from_trigger=True makes no events for outlets; leave one of the two out")
        ignored: dict[str, object] = {
            "on_success_callback": self.on_success_callback,
            "post_execute": self._post_execute_hook,
        }
        if start_from_trigger:
            ignored.update(on_execute_callback=self.on_execute_callback, pre_execute=self._pre_execute_hook)
        if names := [name for name, function in ignored.items() if function]:
            raise ValueError(
                f"Airflow does not call {' and '.join(names)} of a task that a trigger ends; leave"
                f" end_from_trigger=True out, or pass {', '.join(f'{name}=None' for name in names)}"
            )

    def _start_from_trigger(self, target_time: str | None) -> None:
        if not RENDERS_TRIGGERS:
            raise NeedsAirflow("start_from_trigger=True", "3.3", "to render target_time in the triggerer; leave it out")
        if target_time is None:
            raise ValueError("start_from_trigger=True cannot wait for another task's output; leave it out")
        # set here and not in the class, where a mapped task would find it
        self.start_from_trigger = True
        self.start_trigger_args = StartTriggerArgs(
            trigger_cls=class_path(DueTimeTrigger),
            trigger_kwargs={"target_time": target_time, "end_from_trigger": self.end_from_trigger},
            next_method="execute_complete",
            timeout=self.wait_limit,
        )

    def execute(self, context: Context) -> None:
        """Wait in the triggerer, unless the time has passed.

        :raises AirflowFailException: the time cannot be read or has no zone, which a retry does not mend.
        """
        try:
            moment = self._moment()
        except InputError as error:
            raise AirflowFailException(str(error)) from error
        if self.clock() >= moment:
            self.log.info("%s has passed", moment.isoformat())
            return
        self.defer(
            trigger=DueTimeTrigger(moment, end_from_trigger=self.end_from_trigger),
            method_name="execute_complete",
            timeout=self.wait_limit,
        )

    def execute_complete(self, context: Context, event: Any = None) -> None:
        """End, or wait on if Airflow has resumed the task too early (apache/airflow#65248)."""
        self.execute(context)

    def _moment(self) -> datetime:
        return parse_moment("target_time", self.target_time)
