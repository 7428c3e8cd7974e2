"""A migration as a process of its own, so that it can be killed: move.py URL VIRTUAL_HOST."""

from __future__ import annotations

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


def main() -> None:
    host = VirtualHost(*sys.argv[1:])
    here = host.parameters
    source, target = (
        Place("rabbit", topology, [here], lambda: pika.BlockingConnection(here)) for topology in (DELAYED, CELERY)
    )
    Mover(source, target, clock=now).migrate()


main()
