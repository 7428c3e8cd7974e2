"""Durations of other libraries than Python's own, such as Airflow's pendulum, wherever one is taken."""

from __future__ import annotations

from datetime import datetime, timedelta

import pandas
import pendulum
import pytest
from support.send_runs import NOW

from airflow_delayed.message import UTC, delay_of
from airflow_delayed.operators.dispatch import StoreDispatchOperator
from airflow_delayed.operators.send import DelayedSendOperator
from airflow_delayed.operators.send_arguments import SendArguments
from airflow_delayed.sensors.fifo_cycle import FifoCycleSensor
from airflow_delayed.sqs.delay_queue import end_of
from airflow_delayed.sqs.settings import QueueSettings
from airflow_delayed.sqs.stats import CycleCounts, estimate
from airflow_delayed.store.policy import DispatchPolicy

START = pendulum.datetime(2026, 1, 1)


def sending(name):
    """Return a function that passes a duration to the send operator, and returns what it means there."""

    def send(span):
        task = DelayedSendOperator(task_id="t", conn_id="c", value="x", store_conn_id="s", **{name: span})
        return getattr(SendArguments.of(vars(task)), name) // timedelta(microseconds=1)

    return send


DOORS = {
    "delay": lambda span: delay_of(span) // timedelta(microseconds=1),
    **{name: sending(name) for name in ("hold_over", "max_past", "spread")},
    "policy": lambda span: DispatchPolicy(lookahead=span, remember=span, claim_timeout=span).state(),
    "until of a dispatcher": lambda span: (
        StoreDispatchOperator(task_id="t", store_conn_id="s", deliver_conn_ids="c", until=span).until
        // timedelta(seconds=1)
    ),
    "until of a cycle": lambda span: end_of(span, datetime(2026, 1, 1, tzinfo=UTC)),
    "max_late": lambda span: CycleCounts().later_than(
        FifoCycleSensor(task_id="t", destination="q", max_late=span).max_late
    ),
    "retention": lambda span: QueueSettings(retention=span).seconds("retention"),
    "estimate": lambda span: estimate(span, price=1.0),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("span", [pendulum.duration(days=2), START.add(days=2) - START, pandas.Timedelta(days=2)])
def test_a_duration_of_any_library_means_the_same(door, span):
    assert DOORS[door](span) == DOORS[door](timedelta(days=2))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("span", [pendulum.duration(months=1), pendulum.duration(years=1, days=3)])
def test_months_and_years_are_refused(door, span):
    with pytest.raises(Exception, match="has months or years, which are not always as long; write days"):
        DOORS[door](span)


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        (START.add(months=1) - START, timedelta(days=31)),
        (pendulum.duration(weeks=1, microseconds=7), timedelta(days=7, microseconds=7)),
        (pandas.Timedelta(1, "ns"), timedelta(microseconds=1)),
    ],
)
def test_a_delay_is_exact_and_never_early(span, expected):
    assert delay_of(span) == expected


def test_messages_are_spread_by_a_duration_of_pendulum(run):
    run.execute(messages=[{"value": "a"}], delay=pendulum.duration(hours=1), spread=pendulum.duration(minutes=10))
    [message] = run.transport.sent
    assert NOW + timedelta(hours=1) <= message.due_at < NOW + timedelta(hours=1, minutes=10)
