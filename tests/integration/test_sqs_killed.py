"""A sensor that is killed at random moments, on a way to SQS that breaks at random: none lost, none early."""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from functools import partial

from support.faulty import faulty
from support.forked import Child
from support.lengths import length
from support.sqs import ClockedWorld
from support.sqs_processes import pokes

from services import sqs

MESSAGES = length("messages through a sensor that is killed, on SQS", 200, 1_000)
KILLS = length("kills of a sensor, on SQS", 4, 12)
#: What may go wrong has to go wrong also among fewer requests.
SHARE = length("requests to SQS that go wrong meanwhile", 0.15, 0.05)
SHORTEST = 1_800
THREE_DAYS = 259_200


class Runner:
    """The process of a sensor; another takes its place when it is killed."""

    def __init__(self, conn_id: str, destination: str, ahead: Callable[[], timedelta]) -> None:
        self._ahead = ahead
        self._start = partial(Child, pokes, conn_id=conn_id, destination=destination)
        self._sensor = self._start()
        self.kills = 0

    def poke(self, killed_at: int = 0) -> bool:
        """Let the sensor poke, and return whether it is done.

        :param killed_at: the how manieth moment before or after a send or a delete kills it; 0: none.
        """
        self._sensor.say((killed_at, self._ahead()))
        try:
            return self._sensor.answer()
        except EOFError:
            assert self._sensor.ended() == -signal.SIGKILL
            self._sensor.close()
            self._sensor = self._start()
            self.kills += 1
            return False

    def close(self) -> None:
        self._sensor.close()


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
    with faulty(clocked.url, seed=20, share=SHARE, actions=actions) as (url, counts):
        # what boto3 would repeat itself is repeated by us
        retries = {"retries": {"total_max_attempts": 1}}
        runner = Runner(
            connect("sqs_faulty", **sqs.connection(url, config_kwargs=retries, unrestricted_delay=True)),
            clocked.destination,
            lambda: clocked.now() - datetime.now(timezone.utc),
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
    # a batch for each kill and each answer that was lost, at most
    assert len(twice) <= 10 * (KILLS + counts["SendMessageBatch: answer lost"])
    # a duplicate has the id and the content of the first
    assert all(bodies[message_id] == {f"body of {message_id}".encode()} for message_id in due)
