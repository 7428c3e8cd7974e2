"""Callbacks of failures and successes in every order: a message waits for what is red, and for nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from itertools import permutations, product
from random import Random
from threading import Barrier
from typing import NamedTuple

import pytest
from support.lengths import length
from support.stores import DATABASES, Store, on_postgres_too

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.message import DelayedMessage
from airflow_delayed.store.api import Escalation, RunAttempt, RunFailure, RunFailures

#: One of so many orders of the callbacks of two runs; no divisor of the orders of a history, so each one is played.
STEP = length("one of so many orders of callbacks of two runs", 5, 1)
MINUTE = timedelta(minutes=1)
BEGIN = datetime(2090, 1, 1, tzinfo=timezone.utc)
DELAY = timedelta(hours=1)


class Attempt(NamedTuple):
    """One attempt of a run, two minutes after the one before it."""

    run: int
    number: int
    red: bool

    @property
    def started(self) -> datetime:
        return BEGIN + 4 * self.number * MINUTE + 2 * self.run * MINUTE

    @property
    def ended(self) -> datetime:
        return self.started + MINUTE

    def ends(self, other: Attempt, *, replaces: bool) -> bool:
        """The oracle: what a success means for another attempt."""
        if self.red or not other.red:
            return False
        return other.number <= self.number if other.run == self.run else replaces and other.run < self.run


class Scene:
    """Runs of a DAG of its own, whose callbacks reach a store."""

    def __init__(self, hook: DelayedStoreHook, dag_id: str, *, replaces: bool) -> None:
        self.hook = hook
        self.dag_id = dag_id
        self.replaces = replaces

    def attempt(self, one: Attempt) -> RunAttempt:
        name = f"{self.dag_id}/{one.run}"
        return RunAttempt(
            name=name,
            run_id=str(one.run),
            tag=self.dag_id if self.replaces else name,
            started_at=one.started,
            ended_at=one.ended,
            run_after=BEGIN + one.run * MINUTE if self.replaces else None,
        )

    def call(self, one: Attempt) -> None:
        attempt = self.attempt(one)
        if not one.red:
            self.hook.take_back(attempt, actor="test")
            return
        failure = RunFailure(
            dag_id=self.dag_id,
            run_id=attempt.run_id,
            failed_at=one.ended,
            started_at=one.started,
            run_after=attempt.run_after,
        )
        message = DelayedMessage(
            destination="desk",
            body=RunFailures([failure], 1).body(),
            due_at=one.ended + DELAY,
            message_id=f"{attempt.tag}-{one.run}-{one.number}",
            tag=attempt.tag,
        )
        wanted = Escalation(attempt=attempt, message=message, failure=failure, beginning=f"{attempt.tag}-")
        self.hook.arm(wanted, deliver_conn_id="broker")

    def named(self, tag: str) -> tuple[list[tuple[int, datetime]], datetime | None]:
        """The failures that the waiting message of a tag names, and when it is due."""
        found = list(self.hook.list(tag=tag))
        if not found:
            return [], None
        (message,) = found
        content = self.hook.content(message.message_id, body_limit=10_000)
        failures = RunFailures.of(content.headers)
        # the default body says the same
        assert content.body == failures.body()
        assert json.loads(content.body)["failures"] == failures.count == len(failures.latest)
        return [(int(one.run_id), one.failed_at) for one in failures.latest], message.due_at


def histories(runs: int, attempts: int) -> Iterator[Sequence[Attempt]]:
    """Every outcome of every attempt, and every order of its callbacks."""
    for reds in product([True, False], repeat=runs * attempts):
        every = [Attempt(*place, red) for place, red in zip(product(range(runs), range(attempts)), reds, strict=True)]
        yield from permutations(every)


def red_since(every: Sequence[Attempt], *, replaces: bool) -> datetime | None:
    """When the failures that go on began, without a moment between in which nothing was red."""
    since: datetime | None = None
    red: list[Attempt] = []
    for one in sorted(every, key=lambda one: one.ended):
        if one.red and not any(other.ends(one, replaces=replaces) for other in every if other.ended < one.ended):
            since = since or one.ended
            red.append(one)
        red = [other for other in red if not one.ends(other, replaces=replaces)]
        since = since if red else None
    return since


@on_postgres_too
@pytest.mark.parametrize(("replaces", "runs", "attempts"), [(False, 1, 3), (True, 2, 2)], ids=["run", "dag"])
def test_a_message_waits_for_what_is_red_in_whatever_order_callbacks_come(
    store: Store, replaces: bool, runs: int, attempts: int
) -> None:
    hook = store.installed()
    # on a server the rules are the same
    step = (STEP if runs > 1 else 1) * (1 if hook.dialect.name == "sqlite" else 7)
    orders = list(histories(runs, attempts))[::step]
    for number, every in enumerate(orders):
        scene = Scene(hook, f"dag{number}", replaces=replaces)
        for one in every:
            scene.call(one)
        (tag,) = {scene.attempt(one).tag for one in every}
        red = [
            one
            for one in sorted(every, key=lambda one: (one.run, one.number))
            if one.red and not any(other.ends(one, replaces=replaces) for other in every)
        ]
        named, due = scene.named(tag)
        assert named == [(one.run, one.ended) for one in red], every
        if red:
            assert due >= red_since(every, replaces=replaces) + DELAY, every
        # Airflow calls once more
        for one in every if number % 10 == 0 else ():
            scene.call(one)
            assert scene.named(tag) == (named, due), every


@pytest.mark.parametrize("store", DATABASES, indirect=True)
def test_callbacks_at_the_same_moment_end_as_in_any_order(store: Store) -> None:
    hook = store.installed()
    chance = Random(31)
    with ThreadPoolExecutor(9) as pool:
        for number in range(length("histories of nine callbacks at once", 6, 100)):
            every = [Attempt(run, count, chance.random() < 0.6) for run in range(3) for count in range(3)]
            chance.shuffle(every)
            scene, begin = Scene(hook, f"dag{number}", replaces=True), Barrier(len(every))

            def call(one: Attempt, scene: Scene = scene, begin: Barrier = begin) -> None:
                begin.wait()
                scene.call(one)

            list(pool.map(call, every))
            red = [one for one in every if one.red and not any(other.ends(one, replaces=True) for other in every)]
            named, _ = scene.named(scene.dag_id)
            assert sorted(named) == sorted((one.run, one.ended) for one in red), every
