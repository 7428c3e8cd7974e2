"""``airflow delayed bridge``: the process that delivers what services publish with ``x-delay``."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from argparse import Namespace
from typing import TYPE_CHECKING

from airflow_delayed.errors import DelayedError, TransportUnavailable
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.reports import State, TopologyReport

if TYPE_CHECKING:
    from airflow_delayed.rabbitmq.bridge import Bridge

log = logging.getLogger(__name__)


def bridge_(args: Namespace) -> None:
    """``airflow delayed bridge``."""
    from airflow_delayed.compat import AirflowException

    # as Airflow's own commands: connections are those of its database too
    os.environ.setdefault("_AIRFLOW_PROCESS_CONTEXT", "server")
    try:
        bridge = RabbitMQDelayHook(args.conn_id).bridge(args.exchange, args.target, type=args.type)
        if args.install:
            _show(bridge.install(dry_run=args.dry_run))
        elif args.dry_run:
            _show(bridge.verify())
        elif args.redrive:
            print(f"{bridge.redrive():,} messages sent on")
        else:
            _stay(bridge)
    except (DelayedError, ValueError, AirflowException) as error:
        raise SystemExit(str(error)) from None


def _show(report: TopologyReport) -> None:
    for finding in report:
        if finding.state is not State.OK:
            print(finding)
    if not report.ok:
        raise SystemExit(1)
    print(f"ready: {', '.join(f'{count:,} {state}' for state, count in report.counts().items())}")


def _stay(bridge: Bridge) -> None:
    # until the loop takes the signals, nothing is under way
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        bridge.require()
    except TransportUnavailable as error:
        log.warning("%s: %s", bridge, error)

    async def stay() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await bridge.run(stop)

    asyncio.run(stay())
