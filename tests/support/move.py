"""Migrations as processes of their own, so that they can be killed: move.py URL VIRTUAL_HOST.

For each number N that it reads it starts one and prints its id, and ``go`` when that one has asked N times for the
time, as it does for each message. A little later it stands still, so that it is never done before it is killed. They
are forked, since to import all of it anew takes longer than to move.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from itertools import count

import pika

from airflow_delayed.message import utcnow
from airflow_delayed.rabbitmq.facts import Facts
from airflow_delayed.rabbitmq.mover import Mover
from airflow_delayed.rabbitmq.place import Place
from airflow_delayed.rabbitmq.topology import CELERY, DELAYED
from support.rabbitmq import VirtualHost

#: So many times it asks for the time after ``go``.
MORE = 50


def clock(go: int) -> Callable[[], datetime]:
    asked = count(1)

    def now() -> datetime:
        number = next(asked)
        if number == go:
            print("go", flush=True)
        if number == go + MORE:
            signal.pause()
        return utcnow()

    return now


def migrate(go: int) -> None:
    host = VirtualHost(*sys.argv[1:])
    here = host.parameters
    source, target = (
        Place("rabbit", topology, [here], lambda: pika.BlockingConnection(here), Facts)
        for topology in (DELAYED, CELERY)
    )
    Mover(source, target, destinations=["orders"], clock=clock(go)).migrate()


def main() -> None:
    # nobody waits for those that were killed
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            try:
                migrate(int(line))
            finally:
                os._exit(0)
        print(child, flush=True)


main()
