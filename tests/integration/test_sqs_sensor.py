"""How a FifoCycleSensor ends, fails and reports, on a real SQS server whose clock is moved."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import suppress
from datetime import datetime, timedelta, timezone

import pytest
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowFailException, TaskDeferred
from support.sqs import ClockedWorld, sensor_of

from airflow_delayed.errors import TopologyError
from airflow_delayed.sensors.fifo_cycle import FifoCycleSensor
from airflow_delayed.triggers.fifo_cycle import FifoCycleTrigger


def asked(world: ClockedWorld) -> Counter[str]:
    """Count the requests of the hook's client from now on."""
    counts: Counter[str] = Counter()

    def count(model, **_):
        counts[model.name] += 1

    world.on("before-call.sqs", count)
    return counts


def test_empty_is_confirmed_by_several_looks(clocked: ClockedWorld):
    clocked.install()
    sensor = sensor_of(clocked, empty_looks=4)
    clocked.hook.waiting(clocked.destination)
    requests = asked(clocked)
    result = sensor.poke({})
    assert result
    assert requests == {"ReceiveMessage": 4, "GetQueueAttributes": 4}
    assert result.xcom_value["requests"] == 8


def test_a_count_that_was_wrong_once_does_not_end_it(clocked: ClockedWorld):
    clocked.install()
    clocked.hook.send([clocked.message(2000)])
    looks = []

    def miscount(parsed, **_):
        looks.append(1)
        if len(looks) < 3:
            parsed["Attributes"] |= {name: "0" for name in parsed["Attributes"] if name.startswith("Approximate")}

    clocked.on("after-call.sqs.GetQueueAttributes", miscount)
    assert not sensor_of(clocked).poke({})
    assert len(looks) == 3


@pytest.mark.parametrize("as_text", [True, False])
def test_it_ends_at_a_time_whatever_is_left(clocked: ClockedWorld, as_text):
    clocked.install()
    clocked.hook.send([clocked.message(5000)])
    end = clocked.now() + timedelta(seconds=1000)
    sensor = sensor_of(clocked, until=end.astimezone(timezone(timedelta(hours=2))).isoformat() if as_text else end)
    assert not sensor.poke({})
    clocked.advance(905)
    assert not sensor.poke({})
    clocked.advance(96)
    result = sensor.poke({})
    assert result
    assert result.xcom_value["requeued"] == 1
    assert clocked.hook.waiting(clocked.destination) == 1


def test_a_span_counts_from_the_first_poke(clocked: ClockedWorld):
    clocked.install()
    sensor = sensor_of(clocked, until=timedelta(seconds=1000))
    clocked.advance(5000)
    assert not sensor.poke({})
    clocked.advance(940)
    assert not sensor.poke({})
    clocked.advance(61)
    assert sensor.poke({})


@pytest.mark.parametrize("until", ["noon", "2026-01-31T09:30:00", datetime(2026, 1, 31), timedelta(-1), 5])
def test_an_end_that_is_none_is_refused(until):
    with pytest.raises(ValueError, match="until"):
        FifoCycleSensor(task_id="cycle", destination="orders", until=until)


@pytest.mark.parametrize(
    "fields",
    [
        {"empty_looks": 0},
        {"max_late": 5},
        {"max_late": timedelta(-1)},
        {"wait_time_seconds": 21},
        {"wait_time_seconds": -1},
    ],
)
def test_other_parameters_that_mean_nothing(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        FifoCycleSensor(task_id="cycle", destination="orders", **fields)


def test_an_old_message_is_sent_on_and_the_task_fails(clocked: ClockedWorld):
    clocked.install()
    clocked.hook.send([clocked.message(20 * 86_400, "far"), clocked.message(1000, "near")])
    clocked.advance(8 * 86_400)  # a DAG was paused
    sensor = sensor_of(clocked)
    with pytest.raises(AirflowFailException, match=r"8\.0 days, and SQS forgets it after 14\.0.*run all the time"):
        sensor.poke({})
    assert clocked.ids() == ["near"]
    assert clocked.counts(clocked.fifo) == (0, 1, 0)
    clocked.advance(905)
    assert not sensor_of(clocked).poke({})  # and goes on when it is run again


def test_half_of_a_retention_is_not_yet_too_old(clocked: ClockedWorld):
    clocked.install()
    clocked.hook.send([clocked.message(20 * 86_400)])
    clocked.advance(7 * 86_400 - 60)
    assert not sensor_of(clocked).poke({})


def test_one_missing_queue_does_not_hold_the_others_up(clocked: ClockedWorld):
    clocked.install()
    clocked.hook.send([clocked.message(1000)])
    clocked.advance(905)
    with pytest.raises(TopologyError, match=r"queue nowhere(-delay\.fifo)?: missing"):
        sensor_of(clocked, destination=["nowhere", clocked.destination]).poke({})
    clocked.advance(200)
    assert clocked.ids() == ["m1"]


def test_what_came_late_is_told(clocked: ClockedWorld, caplog: pytest.LogCaptureFixture):
    clocked.install()
    clocked.hook.send([clocked.message(1000, f"m{number}") for number in range(3)])
    clocked.advance(1500)
    sensor = sensor_of(clocked, max_late=timedelta(minutes=1), until=timedelta(0))
    with caplog.at_level(logging.INFO):
        summary = sensor.poke({}).xcom_value
    assert 495 <= summary["late_max"] <= 560
    assert summary["late_max"] <= summary["late_p99"] <= summary["late_max"] * 1.1
    assert f"3 messages to {clocked.destination} were later than 0:01:00" in caplog.text
    assert "3 delivered" in caplog.text


def test_resumed_before_its_end_it_goes_on_until_the_same_end(clocked: ClockedWorld):
    clocked.install()
    clocked.hook.send([clocked.message(1000)])
    sensor = sensor_of(clocked, deferrable=True, until=timedelta(hours=1), timeout=7200)
    with pytest.raises(TaskDeferred) as deferred:
        sensor.execute({})
    resumed = deferred.value.kwargs
    clocked.advance(905)
    # by nobody, as a task that was queued for too long; then by a trigger whose clock goes ahead
    done = {"status": "done", "summary": {}, "error": None, "counts": {"delivered": 5}}
    for event, delivered in (({}, 1), ({"event": done}, 5)):
        with pytest.raises(TaskDeferred) as again:
            sensor.execute_complete({}, **event, **resumed)
        trigger_arguments = again.value.trigger.serialize()[1]
        assert (trigger_arguments["until"], trigger_arguments["counts"]["delivered"]) == (resumed["until"], delivered)
        # what is left of the two hours
        assert again.value.timeout <= timedelta(seconds=7200 - 905)
        assert again.value.kwargs == resumed
    clocked.advance(3600)
    assert sensor.execute_complete({}, event={**done, "summary": {"delivered": 5}}, **resumed) == {"delivered": 5}


def test_deferred_it_fails_at_once_if_a_queue_is_missing(clocked: ClockedWorld):
    with pytest.raises(TopologyError, match="missing"):
        sensor_of(clocked, deferrable=True).execute({})


def test_a_trigger_that_is_cancelled_loses_nothing(clocked: ClockedWorld, monkeypatch):
    monkeypatch.setattr("airflow_delayed.clock._present", clocked.now)
    clocked.install()
    due = {f"m{number:02}": clocked.message(1000 + number, f"m{number:02}") for number in range(60)}
    clocked.hook.send(due.values())
    clocked.advance(1300)

    async def run_for(seconds: float) -> None:
        trigger = FifoCycleTrigger(clocked.conn_id, [clocked.destination], wait_time_seconds=1)
        events = trigger.run()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(anext(events), seconds)
        await events.aclose()

    for seconds in (0.02, 0.05, 0.1, 0.2, 1):
        asyncio.run(run_for(seconds))
    clocked.advance(31)
    sensor_of(clocked).poke({})
    clocked.advance(300)
    assert clocked.ids() == sorted(due)


def test_several_sensors_on_one_queue(clocked: ClockedWorld):
    clocked.install()
    due = [f"m{number:03}" for number in range(200)]
    clocked.hook.send([clocked.message(1000, message_id) for message_id in due])
    clocked.advance(905)

    async def side_by_side() -> list[dict]:
        async def one() -> dict:
            trigger = FifoCycleTrigger(clocked.conn_id, [clocked.destination], wait_time_seconds=0, poke_interval=0)
            (event,) = [event async for event in trigger.run()]
            return event.payload

        return await asyncio.gather(*(one() for _ in range(3)))

    results = asyncio.run(side_by_side())
    assert [result["error"] for result in results] == [None] * 3
    assert sum(result["summary"]["delivered"] for result in results) == 200
    clocked.advance(200)
    assert clocked.ids() == due


@pytest.mark.parametrize("deferrable", [False, True])
def test_in_a_dag(clocked: ClockedWorld, run_dag, deferrable):
    clocked.install()
    clocked.hook.send([clocked.message(1000)])
    clocked.advance(905)
    with DAG(f"cycle_{deferrable}", start_date=datetime(2026, 1, 1, tzinfo=timezone.utc), schedule=None) as dag:
        FifoCycleSensor(
            task_id="cycle",
            conn_id=clocked.conn_id,
            destination="{{ params.destination }}",
            wait_time_seconds=0,
            poke_interval=0,
            deferrable=deferrable,
        )
    dag.params = {"destination": clocked.destination}
    run = run_dag(dag)
    assert run.state == "success"
    (instance,) = run.get_task_instances()
    assert instance.xcom_pull(task_ids="cycle")["delivered"] == 1


def test_rescheduled_in_a_dag(clocked: ClockedWorld, run_dag):
    # by default; more often would cost more requests
    assert FifoCycleSensor(task_id="cycle", destination="orders", mode="reschedule").poke_interval == 60
    clocked.install()
    clocked.hook.send([clocked.message(1000)])
    clocked.advance(905)
    with DAG("cycle_rescheduled", start_date=datetime(2026, 1, 1, tzinfo=timezone.utc), schedule=None) as dag:
        FifoCycleSensor(
            task_id="cycle",
            conn_id=clocked.conn_id,
            destination=clocked.destination,
            wait_time_seconds=0,
            poke_interval=0,
            mode="reschedule",
        )
    run = run_dag(dag)
    assert run.state == "success"
    (instance,) = run.get_task_instances()
    assert instance.xcom_pull(task_ids="cycle")["delivered"] == 1  # by an earlier poke than the last


@pytest.mark.parametrize("fields", [{"destination": []}, {"until": "noon"}, {"destination": " "}])
def test_a_template_that_came_out_wrong_is_no_success(clocked: ClockedWorld, fields):
    clocked.install()
    sensor = sensor_of(clocked)
    for name, value in fields.items():
        setattr(sensor, name, value)  # as rendering does
    with pytest.raises(AirflowFailException, match=next(iter(fields))):
        sensor.poke({})


def test_no_destination_is_refused_when_the_dag_is_read():
    with pytest.raises(ValueError, match="destination is empty"):
        FifoCycleSensor(task_id="cycle", destination=[])
