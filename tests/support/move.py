"""Migrations as processes of their own, so that they can be killed: move.py URL VIRTUAL_HOST.

For each number N that it reads it starts one and prints its id, and ``go`` when that one has asked N times for the
time, as it does for each message. A little later it stands still, so that it is never done before it is killed. They
are forked, since to import all of it again takes longer than to move.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from itertools import count

from airflow_delayed.delivery import Connection
from airflow_delayed.message import utcnow
from airflow_delayed.rabbitmq.transport import RabbitMQTransport
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
    connection = Connection(conn_id="rabbit", **host.connection)
    transport = RabbitMQTransport("rabbit", lambda: connection, clock=clock(go))
    transport.migrate("delayed", "celery", destinations=["orders"])


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
