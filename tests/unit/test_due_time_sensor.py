from __future__ import annotations

import asyncio
from datetime import datetime, timedelta, timezone

import pytest
from airflow.models.trigger import Trigger
from airflow.providers.standard.sensors.date_time import DateTimeSensorAsync
from airflow.sdk import DAG, Asset
from airflow.sdk.exceptions import AirflowFailException, AirflowSensorTimeout, TaskDeferred
from airflow.serialization.serialized_objects import DagSerialization
from airflow.triggers.base import TriggerEvent
from support.times import by_clock

from airflow_delayed.compat import NeedsAirflow
from airflow_delayed.errors import InvalidMessage, NaiveTime
from airflow_delayed.message import UTC
from airflow_delayed.sensors import due_time
from airflow_delayed.sensors.due_time import DueTimeSensor
from airflow_delayed.testing.delayed import Delayed
from airflow_delayed.triggers.due_time import DueTimeTrigger

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
LATER = NOW + timedelta(hours=1)


def sensor(target_time: object = LATER, **options: object) -> DueTimeSensor:
    return by_clock(DueTimeSensor(**{"task_id": "wait", "target_time": target_time, **options}), lambda: NOW)


def test_it_waits_in_the_triggerer_until_its_time():
    with pytest.raises(TaskDeferred) as caught:
        sensor("2026-03-01T14:00:00+01:00").execute({})
    assert caught.value.trigger.serialize() == DueTimeTrigger(LATER).serialize()
    assert (caught.value.method_name, caught.value.timeout) == ("execute_complete", None)


@pytest.mark.parametrize("end_from_trigger", [False, True])
def test_a_time_that_has_passed_ends_it_at_once(end_from_trigger):
    assert sensor(NOW, end_from_trigger=end_from_trigger).execute({}) is None
    assert sensor("1970-01-01T00:00Z", end_from_trigger=end_from_trigger).execute({}) is None


def test_a_template_and_the_fixture_of_ones_own_tests(delayed: Delayed):
    with DAG("d", schedule=None):
        task = DueTimeSensor(task_id="wait", target_time="{{ dag_run.run_after + macros.timedelta(hours=3) }}")
    began = delayed.now
    assert delayed.run(task) is None
    assert delayed.now == began + timedelta(hours=3)


def test_resumed_too_early_it_waits_on():
    with pytest.raises(TaskDeferred):
        sensor().execute_complete({}, None)
    assert sensor(NOW).execute_complete({}, NOW) is None


@pytest.mark.parametrize("timeout", [90, timedelta(seconds=90)])
def test_a_timeout_is_passed_on(timeout):
    with pytest.raises(TaskDeferred) as caught:
        sensor(timeout=timeout).execute({})
    assert caught.value.timeout == timedelta(seconds=90)
    started = sensor(timeout=timeout, start_from_trigger=True)
    assert started.start_trigger_args.timeout == timedelta(seconds=90)
    with pytest.raises(AirflowSensorTimeout):
        started.resume_execution("__fail__", {"error": "Trigger timeout"}, {})


@pytest.mark.parametrize(
    ("target_time", "error"),
    [("2026-03-01T12:00", NaiveTime), (datetime(2026, 3, 1), NaiveTime), ("soon", InvalidMessage), (7, InvalidMessage)],
)
def test_what_is_no_time_is_an_error_when_the_dag_is_read(target_time, error):
    with pytest.raises(error, match="target_time: "):
        sensor(target_time)


def test_a_template_that_renders_to_no_time_is_not_retried():
    task = sensor("{{ x }}")
    task.render_template_fields({"x": "2026-03-01T12:00"})
    with pytest.raises(AirflowFailException, match=r"target_time: .* has no time zone"):
        task.execute({})


def test_outlets_have_no_events_from_the_triggerer():
    with pytest.raises(ValueError, match="end_from_trigger=True makes no events for outlets"):
        sensor(end_from_trigger=True, outlets=[Asset("done")])


@pytest.mark.parametrize(
    "options",
    [
        {"on_success_callback": print},
        {"post_execute": print},
        {"on_execute_callback": print, "start_from_trigger": True},
        {"pre_execute": print, "start_from_trigger": True},
    ],
)
def test_what_airflow_would_not_call_is_refused(options):
    name = next(iter(options))
    with pytest.raises(ValueError, match=f"Airflow does not call {name} of a task that a trigger ends.*{name}=None"):
        sensor(end_from_trigger=True, **options)
    assert sensor(**options).task_id == "wait"


def test_callbacks_that_airflow_calls_and_those_of_a_dag_that_are_switched_off():
    sensor(end_from_trigger=True, on_failure_callback=print, on_retry_callback=print, on_execute_callback=print)
    with DAG("d", schedule=None, default_args={"on_success_callback": print}):
        with pytest.raises(ValueError, match="on_success_callback=None"):
            sensor(end_from_trigger=True)
        sensor(task_id="quiet", end_from_trigger=True, on_success_callback=None)


def test_it_takes_the_parameters_of_airflows_own():
    taken = {"target_time": LATER.isoformat(), "start_from_trigger": True, "end_from_trigger": True, "timeout": 60}
    ours, core = (kind(task_id="wait", **taken) for kind in (DueTimeSensor, DateTimeSensorAsync))
    assert ours.template_fields == core.template_fields
    # those of the core's trigger since the standard provider 1.21
    assert ours.start_trigger_args.trigger_kwargs == {"target_time": LATER.isoformat(), "end_from_trigger": True}
    assert ours.start_trigger_args.next_method == core.start_trigger_args.next_method


# start_from_trigger


def started(**options: object) -> tuple[DueTimeSensor, DueTimeTrigger]:
    """The task as the scheduler reads it, and its trigger as the triggerer makes it."""
    with DAG("d", schedule=None) as dag:
        DueTimeSensor(**{"task_id": "wait", "start_from_trigger": True, **options})
    task = DagSerialization.from_dict(DagSerialization.to_dict(dag)).get_task("wait")
    assert task.start_from_trigger
    kept = Trigger(classpath=task.start_trigger_args.trigger_cls, kwargs=task.start_trigger_args.trigger_kwargs)
    from airflow.serialization.decoders import smart_decode_trigger_kwargs

    kwargs = {name: smart_decode_trigger_kwargs(value) for name, value in kept.kwargs.items()}
    return task, DueTimeTrigger(**kwargs, clock=lambda: NOW, sleep=None)


async def fired(trigger: DueTimeTrigger) -> list[TriggerEvent]:
    return [event async for event in trigger.run()]


def test_the_scheduler_starts_the_trigger_and_the_triggerer_renders_the_time():
    task, trigger = started(target_time="{{ x }}", end_from_trigger=True)
    trigger.task_instance = type("TI", (), {"task": task, "task_id": "wait"})()
    assert trigger.template_fields == ("target_time",)
    trigger.render_template_fields({"x": NOW.isoformat()})
    assert trigger.moment == NOW
    assert trigger.serialize()[1] == {"target_time": NOW.isoformat(), "end_from_trigger": True}
    assert len(asyncio.run(fired(trigger))) == 1


@pytest.mark.parametrize("zone", [UTC, timezone(timedelta(hours=5, minutes=30))])
def test_a_time_of_any_zone_goes_through_the_database(zone):
    _, trigger = started(target_time=NOW.astimezone(zone))
    assert trigger.moment == NOW
    assert asyncio.run(fired(trigger)) == [TriggerEvent(NOW)]


def test_what_the_template_renders_to_is_checked_in_the_triggerer():
    _, trigger = started(target_time="{{ x }}")
    trigger.target_time = "2026-03-01T12:00"
    with pytest.raises(NaiveTime, match=r"target_time: .* has no time zone"):
        asyncio.run(fired(trigger))


def test_a_mapped_task_begins_on_a_worker():
    with DAG("d", schedule=None) as dag:
        DueTimeSensor.partial(task_id="wait", start_from_trigger=True).expand(target_time=["a", "b"])
    task = DagSerialization.from_dict(DagSerialization.to_dict(dag)).get_task("wait")
    # without arguments for a trigger the scheduler queues it, see TaskInstance.defer_task
    assert task.start_trigger_args is None


def test_it_cannot_start_from_its_trigger_with_what_another_task_returns():
    with DAG("d", schedule=None):
        before = sensor(task_id="before")
        with pytest.raises(ValueError, match="cannot wait for another task's output"):
            sensor(before.output, start_from_trigger=True)
        sensor(before.output, task_id="later")


def test_before_airflow_3_3_it_does_not_start_from_its_trigger(monkeypatch):
    monkeypatch.setattr(due_time, "RENDERS_TRIGGERS", False)
    with pytest.raises(NeedsAirflow, match=r"start_from_trigger=True needs Airflow 3\.3 or later"):
        sensor(start_from_trigger=True)
