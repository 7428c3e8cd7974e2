"""A sensor that is killed at random moments, on a way to SQS that breaks at random: none lost, none early."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from datetime import timedelta

from support.faulty import faulty
from support.sqs import ClockedWorld, clocked_fixture, clocked_server_fixture  # noqa: F401 - fixtures

from services import sqs

MESSAGES = 1_000
SHORTEST = 1_800
THREE_DAYS = 259_200
KILLS = 12

#: Starts a sensor's process again and again until one ends by itself. Forked, since to import Airflow takes seconds.
RUNNER = """
import os, signal, sys
from airflow_delayed.errors import TransportUnavailable
from airflow_delayed.hooks.sqs import SqsDelayHook
from airflow_delayed.sensors.fifo_cycle import FifoCycleSensor

sensor = FifoCycleSensor(task_id="cycle", conn_id=sys.argv[1], destination=sys.argv[2], wait_time_seconds=0)
sensor.hook = SqsDelayHook(sys.argv[1], sleep=lambda seconds: None)
sensor.hook.get_conn()  # it takes long, and has no connections yet

def cycle():
    left = 0

    def moment(**_):
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    for action in ("SendMessageBatch", "DeleteMessageBatch"):
        for event in ("before-call", "after-call"):
            sensor.hook.get_conn().meta.events.register(f"{event}.sqs.{action}", moment)
    # one line a poke, so that the test says when, and at which moment it is killed
    left = int(sys.stdin.readline())
    while True:
        try:
            done = bool(sensor.poke({}))
        except TransportUnavailable:
            continue
        print("done" if done else "more", flush=True)
        left = int(sys.stdin.readline())

while True:
    child = os.fork()
    if not child:
        cycle()
    print(child, flush=True)
    os.waitpid(child, 0)
"""


class Runner:
    """The process that starts sensors, and the sensor that runs."""

    def __init__(self, conn_id: str, destination: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", RUNNER, conn_id, destination],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.kills = 0
        self._sensor = int(self._line())

    def poke(self, killed_at: int = 0) -> bool:
        """Let the sensor poke, and return whether it is done.

        :param killed_at: the how manieth moment before or after a send or a delete kills it; 0: none. Another takes its
            place.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(f"{killed_at}\n")
        self._process.stdin.flush()
        line = self._line()
        if line.isdigit():
            self._sensor = int(line)
            self.kills += 1
        return line == "done"

    def _line(self) -> str:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.strip() in ("more", "done") or line.strip().isdigit():
                return line.strip()
        raise AssertionError("the runner ended")

    def close(self) -> None:
        self._process.kill()
        os.kill(self._sensor, signal.SIGKILL)
        self._process.communicate()


def test_none_is_lost_and_none_early(clocked: ClockedWorld, connect):
    clocked.install()
    chance = random.Random(20)
    # most within hours: the server's time for a call grows with what waits. None so short that it no longer has to wait
    # in the delay queue when its turn to be sent has come
    delays = [SHORTEST + chance.random() ** 24 * (THREE_DAYS - SHORTEST) for _ in range(MESSAGES - 1)] + [THREE_DAYS]
    messages = [clocked.message(delay, f"m{number}", headers={}) for number, delay in enumerate(delays)]
    due = {message.message_id: message.due_at for message in messages}
    clocked.hook.send(messages)

    arrived: Counter[str] = Counter()
    early: list[str] = []
    bodies: dict[str, set[bytes]] = {}
    actions = ("SendMessageBatch", "DeleteMessageBatch")
    with faulty(clocked.url, seed=20, share=0.05, actions=actions) as (url, counts):
        # what boto3 would repeat itself is repeated by us
        retries = {"retries": {"total_max_attempts": 1}}
        runner = Runner(
            connect("sqs_faulty", **sqs.connection(url, config_kwargs=retries, unrestricted_delay=True)),
            clocked.destination,
        )
        try:
            done = False
            while not done or clocked.counts(clocked.queue) != (0, 0, 0):
                few = len(due) - len(arrived) < 50
                clocked.advance(chance.uniform(100, 9000 if few else 1200))
                if runner.kills < KILLS and chance.random() < 0.4:
                    runner.poke(killed_at=chance.randint(1, 12))
                    clocked.advance(31)
                done = runner.poke()
                found = clocked.arrived()
                now = clocked.now()
                early += [message.message_id for message in found if due[message.message_id] > now]
                arrived.update(message.message_id for message in found)
                for message in found:
                    bodies.setdefault(message.message_id, set()).add(message.body)
                    assert message.due_at == due[message.message_id]
                assert now < max(due.values()) + timedelta(hours=12)
        finally:
            runner.close()

    assert runner.kills == KILLS
    for action in actions:
        assert all(counts[f"{action}: {fault}"] for fault in ("request lost", "answer lost", "too busy")), counts
    assert early == []
    assert set(due) - set(arrived) == set()  # none is lost
    twice = [message_id for message_id, count in arrived.items() if count > 1]
    assert twice, "nothing went wrong, which tests nothing"
    assert len(twice) < MESSAGES / 5
    # a duplicate has the id and the content of the first
    assert all(bodies[message_id] == {f"body of {message_id}".encode()} for message_id in due)
