"""Migrations as processes of their own, so that they can be killed: move.py URL VIRTUAL_HOST.

For each line of its input it starts one and prints its id, then ``go`` when that one has taken its first message. They
are forked, since to import all of it anew takes longer than to move.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import datetime

import pika

from airflow_delayed.message import utcnow
from airflow_delayed.rabbitmq.mover import Mover
from airflow_delayed.rabbitmq.place import Place
from airflow_delayed.rabbitmq.topology import CELERY, DELAYED
from support.rabbitmq import VirtualHost


def now() -> datetime:
    """The present; says when it is first asked for, which is when the first message is taken."""
    if not asked:
        asked.append(print("go", flush=True))
    return utcnow()


asked: list[None] = []


def migrate() -> None:
    host = VirtualHost(*sys.argv[1:])
    here = host.parameters
    source, target = (
        Place("rabbit", topology, [here], lambda: pika.BlockingConnection(here)) for topology in (DELAYED, CELERY)
    )
    Mover(source, target, clock=now).migrate()


def main() -> None:
    # nobody waits for those that were killed
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for _ in sys.stdin:
        child = os.fork()
        if not child:
            try:
                migrate()
            finally:
                os._exit(0)
        print(child, flush=True)


main()
