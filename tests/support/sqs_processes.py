"""What the processes do that the tests of SQS kill: a sensor's work, and moving dead letters back."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from multiprocessing.connection import Connection

from airflow_delayed.clock import utcnow
from airflow_delayed.errors import TransportUnavailable
from airflow_delayed.hooks.sqs import SqsDelayHook
from airflow_delayed.sensors.fifo_cycle import FifoCycleSensor


def _sensor(conn_id: str, destination: str) -> FifoCycleSensor:
    return FifoCycleSensor(task_id="cycle", conn_id=conn_id, destination=destination, wait_time_seconds=0)


def dies_before_its_second_delete(pipe: Connection, conn_id: str, destination: str) -> None:
    """Poke once, and be killed after a batch was sent on and before it is deleted."""
    sensor = _sensor(conn_id, destination)
    deletes = 0

    def kill(**_: object) -> None:
        nonlocal deletes
        deletes += 1
        if deletes == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    sensor.hook.get_conn().meta.events.register("before-call.sqs.DeleteMessageBatch", kill)
    sensor.poke({})


def pokes(pipe: Connection, conn_id: str, destination: str) -> None:
    """Poke once for each pair that is received, and answer whether it is done.

    The first says at which moment before or after a send or a delete it is killed, 0: not at all; the other how far the
    server's clock was moved.
    """
    sensor = _sensor(conn_id, destination)
    ahead = timedelta(0)
    sensor.hook = SqsDelayHook(conn_id, clock=lambda: utcnow() + ahead, sleep=lambda seconds: None)
    left = 0

    def moment(**_: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    for action in ("SendMessageBatch", "DeleteMessageBatch"):
        for event in ("before-call", "after-call"):
            sensor.hook.get_conn().meta.events.register(f"{event}.sqs.{action}", moment)
    left, ahead = pipe.recv()
    while True:
        try:
            done = bool(sensor.poke({}))
        except TransportUnavailable:
            continue
        pipe.send(done)
        left, ahead = pipe.recv()


def moves_dead_letters(pipe: Connection, conn_id: str, destination: str) -> None:
    """Move dead letters back, and say so at the end."""
    SqsDelayHook(conn_id).redrive(destination)
    pipe.send("moved")
