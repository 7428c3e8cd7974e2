"""Virtual hosts on which the default topology's levels are declared, used by one test after the other.

To declare 105 levels and to delete them costs two seconds of CPU, and most tests only send and consume. So a virtual
host is used again, if the test has left it as it was but for destinations and policies, which are deleted, and for
messages that wait, which are purged.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock
from urllib.parse import quote

from pika.exceptions import AMQPError

from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from support.rabbitmq import VirtualHost, install, make_virtual_host

#: So many are made before a test waits for one that was used.
_MOST = 2
#: The statistics of a queue, which alone count what is stuck in dead-lettering, are two seconds old at most on a broker
#: of ours, and five on others.
_STATISTICS_SECONDS = 2.5
_PATIENCE_SECONDS = 6
#: One that is not used costs in this time what it costs to make another one: idle queues report every two seconds.
_WORTH_SECONDS = 150

Definitions = dict[str, list[str]]


class VirtualHosts:
    """The virtual hosts of one broker that a process of the test run uses again."""

    _made: ClassVar[list[VirtualHosts]] = []

    def __init__(self, url: str) -> None:
        self._made.append(self)
        self._url = url
        #: Those that no test uses, and when their last test ended; the one that has waited longest first.
        self._free: list[tuple[VirtualHost, float]] = []
        self._template: Definitions = {}

    @contextmanager
    def one(self) -> Iterator[VirtualHost]:
        """Yield one with nothing but the default topology."""
        host = self._take()
        try:
            yield host
        finally:
            if self._clean(host):
                self._free.append((host, time.monotonic()))
            else:
                _delete(host)

    def close(self) -> None:
        while self._free:
            _delete(self._free.pop()[0])

    @classmethod
    def delete_idle(cls) -> None:
        """Delete those of this process that no test has used for long."""
        for each in cls._made:
            while each._free and time.monotonic() - each._free[0][1] > _WORTH_SECONDS:
                _delete(each._free.pop(0)[0])

    def _take(self) -> VirtualHost:
        while True:
            for host, since in list(self._free):
                idle = time.monotonic() - since
                rests = idle > _STATISTICS_SECONDS and _is_empty(host)
                if rests or idle > _PATIENCE_SECONDS:
                    self._free.remove((host, since))
                    if rests and _definitions(host) == self._template:
                        return host
                    _delete(host)
            if len(self._free) < _MOST:
                return self._make()
            time.sleep(0.1)

    def _make(self) -> VirtualHost:
        host = make_virtual_host(self._url)
        conn_id = "made_for_many_tests"
        with mock.patch.dict(os.environ, {f"AIRFLOW_CONN_{conn_id.upper()}": json.dumps(host.connection)}):
            install(RabbitMQDelayHook(conn_id))
        self._template = _definitions(host)
        return host

    def _clean(self, host: VirtualHost) -> bool:
        """Delete what a test has added, and the messages that wait in the levels; return whether that could be done."""
        found = _definitions(host)
        added = {kind: _names(parts) - _names(self._template[kind]) for kind, parts in found.items()}
        try:
            with host.channel() as channel:
                for queue in _names(self._template["queues"]):
                    if channel.queue_declare(queue, passive=True).method.message_count:
                        channel.queue_purge(queue)
                for queue in added["queues"]:
                    channel.queue_delete(queue)
                for exchange in added["exchanges"]:
                    channel.exchange_delete(exchange)
        except AMQPError:
            return False
        for policy in added["policies"]:
            host.manage("DELETE", f"policies/{{vhost}}/{quote(policy, safe='')}")
        return True


def _definitions(host: VirtualHost) -> Definitions:
    """Return all that is declared, in an order of its own."""
    found: Any = host.manage("GET", "definitions/{vhost}")
    return {
        kind: sorted(json.dumps(each, sort_keys=True) for each in parts)
        for kind, parts in found.items()
        if isinstance(parts, list)
    }


def _names(parts: list[str]) -> set[str]:
    return {json.loads(each).get("name", "") for each in parts}


def _is_empty(host: VirtualHost) -> bool:
    """Whether no message waits in any queue, nor is stuck on its way to the next one."""
    queues: Any = host.manage("GET", "queues/{vhost}?columns=name,messages,messages_dlx")
    return not any(queue.get("messages") != 0 or queue.get("messages_dlx") for queue in queues)


def _delete(host: VirtualHost) -> None:
    host.manage("DELETE", "vhosts/{vhost}")
